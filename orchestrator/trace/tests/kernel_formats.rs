//! Every event format of the kernel that runs this test, if its tracefs can be read.

use std::fs;
use std::path::Path;

use vmtrail_trace::catalog::Catalog;
use vmtrail_trace::{Endian, LongSize};

const EVENTS: &str = "/sys/kernel/tracing/events";

/// Print formats that call into the kernel; nothing outside of it can evaluate them.
fn is_kernel_only(print_fmt: &str) -> bool {
    [
        "trace_seq_buffer_ptr",
        "trace_seq_printf",
        "mc_event_error_type",
        "xen_hypercall_name",
    ]
    .iter()
    .any(|function| print_fmt.contains(function))
        || print_fmt.contains("->name)")
}

#[test]
fn all_formats_of_this_kernel_compile() {
    if cfg!(target_endian = "big") || !Path::new(EVENTS).is_dir() {
        eprintln!("skipped: {EVENTS} cannot be read here");
        return;
    }
    let long = if cfg!(target_pointer_width = "64") {
        LongSize::Eight
    } else {
        LongSize::Four
    };
    let mut catalog = Catalog::new(Endian::Little, long);
    let mut failed = Vec::new();
    for system in fs::read_dir(EVENTS).unwrap().flatten() {
        let Ok(events) = fs::read_dir(system.path()) else {
            continue;
        };
        for event in events.flatten() {
            let Ok(text) = fs::read_to_string(event.path().join("format")) else {
                continue;
            };
            let system = system.file_name().to_string_lossy().into_owned();
            let event = catalog.add(&system, &text).unwrap();
            if let Err(error) = event.program()
                && !is_kernel_only(event.print_fmt())
            {
                failed.push(format!("{system}:{}: failed to {error}", event.name()));
            }
        }
    }
    eprintln!("{} formats read", catalog.events().len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
