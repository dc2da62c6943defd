//! Names and thread groups of tasks: tracefs `saved_cmdlines` and `saved_tgids`.

use std::collections::BTreeMap;

/// Most tasks kept. `saved_cmdlines_size` and `PID_MAX_LIMIT` allow up to four million; a trace names thousands.
const MAX_TASKS: usize = 1 << 20;

/// A task's name has at most 15 bytes (`TASK_COMM_LEN` - 1); 64 in case that grows.
const MAX_NAME: usize = 64;

/// Names of tasks by pid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comms {
    names: BTreeMap<i32, Box<[u8]>>,
}

impl Comms {
    /// Reads `saved_cmdlines`: `pid name` a line. The first line of a pid counts.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let mut comms = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            let line = line.trim_ascii_start();
            let Some(space) = line.iter().position(|byte| *byte == b' ') else {
                continue;
            };
            let (pid, name) = line.split_at(space);
            let pid = std::str::from_utf8(pid)
                .ok()
                .and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid {
                comms.learn(pid, name.get(1..).unwrap_or_default());
            }
        }
        comms
    }

    /// Remembers the name of a task unless one is known; true if it was news.
    pub fn learn(&mut self, pid: i32, name: &[u8]) -> bool {
        if self.names.len() >= MAX_TASKS || self.names.contains_key(&pid) {
            return false;
        }
        self.names
            .insert(pid, name.get(..MAX_NAME).unwrap_or(name).into());
        true
    }

    /// The name, if known. Pid 0 is `<idle>`: every CPU has one, and none is in the list.
    #[must_use]
    pub fn get(&self, pid: i32) -> Option<&[u8]> {
        if pid == 0 {
            return Some(b"<idle>");
        }
        self.names.get(&pid).map(|name| &**name)
    }

    /// All names, by pid.
    pub fn iter(&self) -> impl Iterator<Item = (i32, &[u8])> {
        self.names.iter().map(|(pid, name)| (*pid, &**name))
    }
}

/// Thread groups (processes) of tasks by pid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tgids {
    groups: BTreeMap<i32, i32>,
}

impl Tgids {
    /// Reads `saved_tgids`: `pid tgid` a line.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let mut tgids = Self::default();
        for line in text.split(|byte| *byte == b'\n').take(MAX_TASKS) {
            let Ok(line) = std::str::from_utf8(line) else {
                continue;
            };
            let mut words = line.split_whitespace();
            if let (Some(Ok(pid)), Some(Ok(tgid))) =
                (words.next().map(str::parse), words.next().map(str::parse))
            {
                tgids.groups.insert(pid, tgid);
            }
        }
        tgids
    }

    /// The process of a task, if known.
    #[must_use]
    pub fn get(&self, pid: i32) -> Option<i32> {
        self.groups.get(&pid).copied()
    }

    /// All of them, by pid.
    pub fn iter(&self) -> impl Iterator<Item = (i32, i32)> {
        self.groups.iter().map(|(pid, tgid)| (*pid, *tgid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_spaces_and_nonsense() {
        let mut comms = Comms::parse(b"12 qemu-system-x86\n 13 CPU 0/KVM\nx y\n12 other\n14\n");
        assert_eq!(comms.get(12), Some(&b"qemu-system-x86"[..]));
        assert_eq!(comms.get(13), Some(&b"CPU 0/KVM"[..]));
        assert_eq!(comms.get(0), Some(&b"<idle>"[..]));
        assert_eq!(comms.get(14), None);
        assert!(comms.learn(14, b"new") && !comms.learn(12, b"new"));
        let tgids = Tgids::parse(b"13 12\nbroken\n");
        assert_eq!((tgids.get(13), tgids.get(12)), (Some(12), None));
    }
}
