//! Scenarios with real kernels in real QEMUs. Never skipped: what they need, they set up.
//!
//! They print what they do, bound every wait, and assert no wall time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use vmtrail_tests::lab::guest::{Ports, VmSpec};
use vmtrail_tests::lab::initramfs::{self, Exporter, Userland};
use vmtrail_tests::lab::kernel::Release;
use vmtrail_tests::lab::{Lab, build, setup};

/// One scenario at a time: two emulated guests already fill two cores, and four would starve each other into timeouts.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn told(what: &str) {
    eprintln!("scenario: {what}");
}

fn boots_and_counts(release: Release) -> Result<()> {
    let _alone = alone();
    let lab = Lab::open()?;
    let ready = setup::setup(&lab, release)?;
    // Marks only: reading the kernel's text of a million other events takes an emulated guest longer than the ring lasts.
    let userland = Userland {
        exporter: Exporter::Nobody,
        ..Userland::default()
    };
    let image = initramfs::image(&lab, &ready, None, &build::workload(&lab)?, &userland)?;
    let spec = VmSpec {
        ports: Ports::DeviceOnly,
        ..VmSpec::new("boots", &ready.kernel.image, &image)
    };
    told(&format!(
        "boot a guest with kernel {release} and let its CPUs count"
    ));
    let mut guest = spec.boot()?;
    guest.wait_ready()?;
    let version = guest.shell("uname -r")?;
    assert!(
        version.starts_with(&format!("{release}.")),
        "the guest runs {version}"
    );
    let device = guest.shell("ls /sys/bus/virtio/drivers/virtio_console | grep virtio")?;
    told(&format!(
        "it has {} and runs {}",
        device.trim(),
        version.trim()
    ));
    let last = guest.stop_marks()?;
    told(&format!("last marks: {last:?}"));
    assert_eq!(last.iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>(), [0, 1]);
    // The kernel's own trace of them: what the guest says it wrote last is the last that is there.
    for (cpu, seq) in last {
        let trace = guest.shell(&format!(
            "grep -o 'vmtrail-mark cpu={cpu} seq=.*' /sys/kernel/tracing/instances/vmtrail/per_cpu/cpu{cpu}/trace | tail -n 1"
        ))?;
        assert_eq!(trace.trim(), format!("vmtrail-mark cpu={cpu} seq={seq}"));
    }
    assert!(
        guest.stop_marks()?.is_empty(),
        "a second stop finds no marks to end"
    );
    guest.stop()
}

#[test]
fn a_guest_of_6_1_boots_and_counts() -> Result<()> {
    boots_and_counts(Release::V6_1)
}

#[test]
fn a_guest_of_6_12_boots_and_counts() -> Result<()> {
    boots_and_counts(Release::V6_12)
}
