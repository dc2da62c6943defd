//! `vmtrail`: one continuous kernel trace of a virtual machine.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmtrail::cli::main()
}
