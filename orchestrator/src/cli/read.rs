//! `vmtrail verify` and `vmtrail info`.

use std::process::ExitCode;

use anyhow::Result;

use super::args::{InfoArgs, VerifyArgs};
use crate::trail::TrailReader;

pub(super) fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let reader = TrailReader::open(&args.trail)?;
    let verification = crate::verify::verify(&reader)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&verification)?);
    } else {
        print!("{verification}");
    }
    Ok(ExitCode::from(verification.exit_code()))
}

pub(super) fn info(args: &InfoArgs) -> Result<ExitCode> {
    let reader = TrailReader::open(&args.trail)?;
    let info = crate::info::info(&reader)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&info)?);
    } else {
        print!("{info}");
    }
    Ok(ExitCode::SUCCESS)
}
