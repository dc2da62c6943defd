//! The house rules, run. `ARCHITECTURE.md` gives the reasons; a rule that nobody runs is a wish.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use vmtrail_tests::lab::repository;

/// Which of our crates each of our crates may use. Arrows point to what is used; `None` is anything.
const ARROWS: [(&str, Option<&[&str]>); 8] = [
    ("vmtrail-wire", Some(&[])),
    ("vmtrail-qmp", Some(&[])),
    ("vmtrail-trace", Some(&[])),
    ("vmtrail-continuity", Some(&["vmtrail-wire"])),
    ("vmtrail-agent", Some(&["vmtrail-wire"])),
    (
        "vmtrail",
        Some(&[
            "vmtrail-continuity",
            "vmtrail-qmp",
            "vmtrail-trace",
            "vmtrail-wire",
        ]),
    ),
    ("vmtrail-tests", None),
    ("vmtrail-examples", None),
];

/// Crates that turn bytes and values into values. Whoever wants input or output there has to edit a manifest first, in
/// view of everybody. `vmtrail-qmp` is one without its `client` feature.
const PURE: [(&str, &str); 4] = [
    ("vmtrail-wire", "agent/wire"),
    ("vmtrail-qmp", "qmp"),
    ("vmtrail-continuity", "orchestrator/continuity"),
    ("vmtrail-trace", "orchestrator/trace"),
];

/// Files of pure crates that are compiled with a feature only.
const BEHIND_FEATURES: [&str; 2] = ["qmp/src/client.rs", "qmp/src/testing.rs"];

/// Crates that do input and output, or whose presence means somebody does.
const IMPURE: [&str; 11] = [
    "async-std",
    "futures-executor",
    "libc",
    "mio",
    "nix",
    "polling",
    "rand",
    "rustix",
    "smol",
    "socket2",
    "tokio",
];

/// Words that pure sources do not have: time and the world are arguments, and a hash's order is not the same twice.
const IMPURE_WORDS: [&str; 12] = [
    "Instant::now",
    "SystemTime",
    "thread::sleep",
    "thread::spawn",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::os",
    "HashMap",
    "HashSet",
    "RandomState",
];

/// The one place for it, with its papers.
const UNSAFE_ROOM: &str = "agent/src/sys";

/// The one translation between QMP's words and ours.
const TRANSLATION: &str = "orchestrator/src/driver/vmm.rs";

#[test]
fn crates_use_each_other_along_the_arrows() {
    let manifests = manifests();
    let ours: BTreeSet<&str> = manifests.keys().map(String::as_str).collect();
    let known: BTreeSet<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    assert_eq!(
        ours, known,
        "a crate was added or removed: say here what it may use"
    );
    let mut wrong = Vec::new();
    for (name, allowed) in ARROWS {
        let Some(allowed) = allowed else { continue };
        for used in dependencies(&manifests[name], &[None, Some("build"), Some("dev")]) {
            // A crate may name itself, to have a feature in its own tests.
            if ours.contains(used.as_str()) && used != name && !allowed.contains(&used.as_str()) {
                wrong.push(format!("{name} uses {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn nothing_impure_lies_under_the_pure_crates() {
    let mut wrong = Vec::new();
    for (name, _) in PURE {
        // `cargo tree` resolves the features of this package alone; `cargo metadata` would give the union over the
        // workspace, where the orchestrator asks for QMP's client.
        let output = Command::new(env!("CARGO"))
            .args([
                "tree",
                "-p",
                name,
                "--no-default-features",
                "-e",
                "normal,build",
            ])
            .args(["--prefix", "none", "--format", "{p}"])
            .current_dir(repository())
            .output()
            .expect("cargo runs, for it runs this test");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let package = line.split(' ').next().unwrap_or_default();
            if IMPURE.contains(&package) {
                wrong.push(format!("{name} has {package} under it"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn pure_sources_take_time_and_the_world_as_arguments() {
    let mut wrong = Vec::new();
    for (name, dir) in PURE {
        let root = repository().join(dir);
        for source in sources(&root.join("src")) {
            if BEHIND_FEATURES
                .iter()
                .any(|file| source.path.ends_with(file))
            {
                continue;
            }
            for (number, line) in source.code_without_tests() {
                for word in IMPURE_WORDS {
                    if line.contains(word) {
                        wrong.push(format!("{}:{number}: {word}", source.shown()));
                    }
                }
            }
        }
        let lib = fs::read_to_string(root.join("src/lib.rs")).unwrap_or_default();
        for attribute in ["#![forbid(unsafe_code)]", "#![warn(missing_docs)]"] {
            if !lib.contains(attribute) {
                wrong.push(format!("{name}: lib.rs lacks {attribute}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn unsafe_has_one_room() {
    let mut wrong = Vec::new();
    for source in all_sources() {
        if source.path.starts_with(repository().join(UNSAFE_ROOM)) {
            continue;
        }
        for (number, line) in source.code() {
            let is_word = |word: &str| word == concat!("un", "safe");
            if line
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(is_word)
            {
                wrong.push(format!("{}:{number}", source.shown()));
            }
        }
    }
    assert!(wrong.is_empty(), "only {UNSAFE_ROOM} may: {wrong:#?}");
}

#[test]
fn qmp_is_translated_in_one_place() {
    let mut wrong = Vec::new();
    for source in sources(&repository().join("orchestrator/src")) {
        if source.path.ends_with(TRANSLATION) {
            continue;
        }
        let code: String = source
            .code()
            .map(|(_, line)| line)
            .collect::<Vec<_>>()
            .join("\n");
        let ours = code.contains("VmmEvent::") || code.contains("VmmCommand::");
        if code.contains("vmtrail_qmp") && ours {
            wrong.push(source.shown());
        }
    }
    assert!(
        wrong.is_empty(),
        "{TRANSLATION} is the only place that knows both: {wrong:#?}"
    );
}

#[test]
fn documents_are_reached_and_name_what_exists() {
    let root = repository();
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md"))
        .expect("the repository has an ARCHITECTURE.md");
    let mut documents = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    let mut wrong = Vec::new();
    for entry in fs::read_dir(root.join("docs"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let name = format!("docs/{}", entry.file_name().display());
        if !architecture.contains(&name) {
            wrong.push(format!("ARCHITECTURE.md does not lead to {name}"));
        }
        documents.push(path);
    }
    for document in documents {
        let text = fs::read_to_string(&document)
            .unwrap_or_else(|error| panic!("{}: {error}", document.display()));
        for named in paths_named_in(&text) {
            let beside = document.parent().map(|dir| dir.join(&named));
            if !root.join(&named).exists() && !beside.is_some_and(|path| path.exists()) {
                wrong.push(format!(
                    "{} names {named}, which is not there",
                    document.display()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Paths in backticks that begin with one of our directories, and relative targets of links.
fn paths_named_in(text: &str) -> Vec<String> {
    const OURS: [&str; 8] = [
        "agent/",
        "qmp/",
        "orchestrator/",
        "tests/",
        "examples/",
        "docs/",
        ".ci/",
        ".cargo/",
    ];
    let mut named = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        // Every second piece lies between two backticks.
        for quoted in line.split('`').skip(1).step_by(2) {
            let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
            if OURS.iter().any(|dir| quoted.starts_with(dir)) && quoted.chars().all(plain) {
                named.push(quoted.trim_end_matches('/').to_owned());
            }
        }
        for target in line
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split([')', '#']).next())
        {
            if !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                named.push(target.to_owned());
            }
        }
    }
    named
}

#[test]
fn paths_are_found_in_documents() {
    let text = "see `agent/wire/` and [x](docs/wire.md#a), not `agent/<x>` or [y](https://a/b)\n```\n`qmp/no`\n```\n";
    assert_eq!(paths_named_in(text), ["agent/wire", "docs/wire.md"]);
}

fn manifests() -> BTreeMap<String, Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(repository())
        .output()
        .expect("cargo runs, for it runs this test");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    let packages = metadata["packages"]
        .as_array()
        .expect("metadata has packages");
    packages
        .iter()
        .map(|package| {
            let name = package["name"].as_str().expect("a package has a name");
            (name.to_owned(), package.clone())
        })
        .collect()
}

fn dependencies(manifest: &Value, kinds: &[Option<&str>]) -> BTreeSet<String> {
    let dependencies = manifest["dependencies"]
        .as_array()
        .expect("a package has dependencies");
    dependencies
        .iter()
        .filter(|dependency| kinds.contains(&dependency["kind"].as_str()))
        .filter_map(|dependency| dependency["name"].as_str().map(str::to_owned))
        .collect()
}

struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    fn shown(&self) -> String {
        self.path
            .strip_prefix(repository())
            .unwrap_or(&self.path)
            .display()
            .to_string()
    }

    /// Numbered lines that are not comments.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
            .map(|(number, line)| (number + 1, line))
    }

    /// Unit tests stand at the end of their file.
    fn code_without_tests(&self) -> impl Iterator<Item = (usize, &str)> {
        self.code()
            .take_while(|(_, line)| !line.starts_with("#[cfg(test)]"))
    }
}

fn all_sources() -> Vec<Source> {
    ["agent", "qmp", "orchestrator", "tests", "examples"]
        .iter()
        .flat_map(|dir| sources(&repository().join(dir)))
        .collect()
}

fn sources(dir: &Path) -> Vec<Source> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            if entry.file_name() != "target" {
                found.extend(sources(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            found.push(Source { path, text });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}
