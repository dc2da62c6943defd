//! Which guest kernels the lab knows, and where an unpacked one keeps its things.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, fs};

use anyhow::{Context as _, Result, bail};

use super::Lab;

/// A guest kernel of Debian's `linux-image-cloud-amd64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// 6.1 of bookworm: virtio is all modules, tracefs has no sub-buffer sizes. The default.
    V6_1,
    /// 6.12 of bookworm-backports: virtio-serial is built in, sub-buffers may be larger than a page.
    V6_12,
}

impl Release {
    /// The suites that carry it, as (archive, suite).
    pub(super) fn suites(self) -> &'static [(Archive, &'static str)] {
        match self {
            Self::V6_1 => &[
                (Archive::Main, "bookworm"),
                (Archive::Security, "bookworm-security"),
            ],
            Self::V6_12 => &[(Archive::Main, "bookworm-backports")],
        }
    }
}

/// Debian keeps security updates apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Archive {
    Main,
    Security,
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        })
    }
}

impl FromStr for Release {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "6.1" => Ok(Self::V6_1),
            "6.12" => Ok(Self::V6_12),
            other => bail!("the lab has no kernel {other}: it knows 6.1 and 6.12"),
        }
    }
}

/// An unpacked kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Which one.
    pub release: Release,
    /// The compressed image, as QEMU's `-kernel` wants it.
    pub image: PathBuf,
    modules: PathBuf,
}

/// Modules that make virtio-serial ports, each after those it needs.
///
/// The order is the dependency order of 6.1; there is no depmod in the guest (and no `modules.dep` in a package that was
/// never installed), so `modprobe` could not find it out.
const VIRTIO_SERIAL: [&str; 6] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_console",
];

impl Kernel {
    /// Finds a kernel that `setup` has unpacked; `None` if it has not.
    ///
    /// # Errors
    ///
    /// If the directory is there and cannot be read or is not what `setup` leaves.
    pub fn find(lab: &Lab, release: Release) -> Result<Option<Self>> {
        let tree = Self::tree(lab, release);
        if !tree.is_dir() {
            return Ok(None);
        }
        let image = only_entry(&tree.join("boot"), |name| name.starts_with("vmlinuz-"))?;
        // Debian packages say /lib/modules up to bookworm and /usr/lib/modules after it.
        let lib = if tree.join("lib/modules").is_dir() {
            "lib/modules"
        } else {
            "usr/lib/modules"
        };
        let modules = only_entry(&tree.join(lib), |_| true)?;
        Ok(Some(Self {
            release,
            image,
            modules,
        }))
    }

    /// Where `setup` unpacks it.
    pub(super) fn tree(lab: &Lab, release: Release) -> PathBuf {
        lab.root().join("kernel").join(release.to_string())
    }

    /// The files of the modules that virtio-serial needs and that are not built in, in the order of insertion.
    ///
    /// # Errors
    ///
    /// If a module is neither built in nor there.
    pub fn virtio_serial_modules(&self) -> Result<Vec<PathBuf>> {
        let builtin_list = self.modules.join("modules.builtin");
        let builtin = fs::read_to_string(&builtin_list)
            .with_context(|| format!("failed to read {}", builtin_list.display()))?;
        let builtin: Vec<String> = builtin
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        let mut files = BTreeMap::new();
        collect_modules(&self.modules.join("kernel/drivers"), &mut files)?;
        let mut needed = Vec::new();
        for name in VIRTIO_SERIAL {
            if let Some(path) = files.get(name) {
                needed.push(path.clone());
            } else if !builtin.iter().any(|built| built == name) {
                bail!(
                    "failed to find the module {name} under {}",
                    self.modules.display()
                );
            }
        }
        Ok(needed)
    }
}

fn only_entry(dir: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("failed to read {}", dir.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("failed to read {}", dir.display()))?;
        if entry.file_name().to_str().is_some_and(&wanted) {
            found.push(entry.path());
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        n => bail!(
            "failed to use {}: {n} kernels where one was expected; remove the directory and run `cargo lab setup`",
            dir.display()
        ),
    }
}

fn collect_modules(dir: &Path, into: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("failed to read {}", dir.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("failed to read {}", dir.display()))?;
        let path = entry.path();
        if path.is_dir() {
            collect_modules(&path, into)?;
        } else if let Some(name) = module_name(&path) {
            into.insert(name, path);
        }
    }
    Ok(())
}

/// The kernel's name of a module file: `virtio-rng.ko.xz` is `virtio_rng`.
fn module_name(path: &Path) -> Option<String> {
    let (stem, suffix) = path.file_name()?.to_str()?.split_once('.')?;
    (suffix == "ko" || suffix.starts_with("ko.")).then(|| stem.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_as_the_kernel_names_it() {
        assert_eq!(
            module_name(Path::new("a/virtio-rng.ko.xz")).as_deref(),
            Some("virtio_rng")
        );
        assert_eq!(
            module_name(Path::new("virtio_pci.ko")).as_deref(),
            Some("virtio_pci")
        );
        assert_eq!(module_name(Path::new("modules.order")), None);
    }

    #[test]
    fn a_release_is_read_as_it_is_shown() {
        for release in [Release::V6_1, Release::V6_12] {
            assert_eq!(release.to_string().parse::<Release>().unwrap(), release);
        }
        assert!("5.10".parse::<Release>().is_err());
    }
}
