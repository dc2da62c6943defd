//! pending
use super::args::{InfoArgs, VerifyArgs};
use anyhow::{Result, bail};
use std::process::ExitCode;
pub(super) fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    bail!("{:?}", args)
}
pub(super) fn info(args: &InfoArgs) -> Result<ExitCode> {
    bail!("{:?}", args)
}
