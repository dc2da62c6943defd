//! Benchmarks: ours and the other in turn, on the same input, in one run; medians, spread, and a ratio that a script can read.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::Lab;
use super::demo::{EVENTS, Parts, traced_userland};
use super::guest::Accel;
use super::initramfs::{Exporter, Userland};
use super::qmp::migrate_plainly;
use super::setup::say;

/// How long a guest runs before it moves.
const WARM_UP: Duration = Duration::from_secs(3);

/// Middle and edges of some measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Half are below.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// A quarter are below.
    pub lower_quartile: f64,
    /// A quarter are above.
    pub upper_quartile: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of these; `None` of none.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self {
            median: quantile(&sorted, 2)?,
            min: *sorted.first()?,
            lower_quartile: quantile(&sorted, 1)?,
            upper_quartile: quantile(&sorted, 3)?,
            max: *sorted.last()?,
        })
    }
}

/// The `quarters`-th quartile of sorted values, between neighbours where it falls between them.
fn quantile(sorted: &[f64], quarters: usize) -> Option<f64> {
    let steps = sorted.len().checked_sub(1)? * quarters;
    let (below, part) = (steps / 4, steps % 4);
    let low = *sorted.get(below)?;
    let high = sorted.get(below + 1).copied().unwrap_or(low);
    let part = f64::from(u8::try_from(part).ok()?) / 4.0;
    Some(low + (high - low) * part)
}

/// QMP's `downtime` of pairs of migrations, in milliseconds.
#[derive(Debug, Clone, Default)]
pub struct Blackouts {
    /// With vmtrail recording and draining.
    pub with: Vec<f64>,
    /// The same guest and load without ports, agent or reader.
    pub without: Vec<f64>,
    /// Of those with vmtrail: how long the drain held the guest.
    pub drain: Vec<f64>,
}

/// Migrates `pairs` guests with vmtrail and as many without, in turn.
///
/// # Errors
///
/// If the lab fails, or a trail of one of the runs is not continuous: a fast migration that loses is not measured.
pub fn blackout(
    lab: &Lab,
    parts: &Parts,
    accel: Accel,
    pairs: u32,
    dir: &Path,
) -> Result<Blackouts> {
    let mut blackouts = Blackouts::default();
    for pair in 1..=pairs {
        // The first of a pair has the warmer machine; who is first alternates.
        if pair % 2 == 1 {
            with_vmtrail(
                lab,
                parts,
                accel,
                &dir.join(format!("trail-{pair}")),
                &mut blackouts,
            )?;
            without(lab, parts, accel, &mut blackouts)?;
        } else {
            without(lab, parts, accel, &mut blackouts)?;
            with_vmtrail(
                lab,
                parts,
                accel,
                &dir.join(format!("trail-{pair}")),
                &mut blackouts,
            )?;
        }
        say(&format!(
            "lab: pair {pair}: downtime with vmtrail {} ms (drain {:.1} ms), without {} ms",
            blackouts.with.last().copied().unwrap_or_default(),
            blackouts.drain.last().copied().unwrap_or_default(),
            blackouts.without.last().copied().unwrap_or_default(),
        ));
    }
    Ok(blackouts)
}

fn with_vmtrail(
    lab: &Lab,
    parts: &Parts,
    accel: Accel,
    trail: &Path,
    into: &mut Blackouts,
) -> Result<()> {
    let mut spec = parts.spec(lab, "with", &traced_userland())?;
    spec.accel = accel;
    let mut source = spec.boot()?;
    source.wait_ready()?;
    let events: Vec<String> = EVENTS.map(str::to_owned).to_vec();
    let recorder =
        parts
            .vmtrail
            .record(&source, trail, &trail.with_extension("log"), &events, &[])?;
    thread::sleep(WARM_UP);
    let destination = spec.incoming()?;
    let ended = recorder.migrate(&source, &destination, &[])?;
    let report = ended
        .reports()
        .into_iter()
        .rfind(|report| report["report"] == "migrated")
        .with_context(|| format!("failed to migrate: {}\n{}", ended.stderr, ended.stdout))?;
    recorder.stop()?;
    source.stop()?;
    destination.stop()?;
    let verified = parts.vmtrail.verify(trail)?;
    if !verified.is_continuous() {
        bail!(
            "failed to measure: the trail {} is {}",
            trail.display(),
            verified.verdict()
        );
    }
    let figure = |value: &Value, what: &str| {
        value
            .as_f64()
            .with_context(|| format!("failed to hear {what} from vmtrail migrate"))
    };
    into.with
        .push(figure(&report["qemu_downtime_ms"], "QEMU's downtime")?);
    into.drain
        .push(figure(&report["drain_ns"], "the drain's time")? / 1e6);
    Ok(())
}

/// The same load and the same events, into a ring that nobody reads.
fn without(lab: &Lab, parts: &Parts, accel: Accel, into: &mut Blackouts) -> Result<()> {
    let userland = Userland {
        exporter: Exporter::Nobody,
        events: EVENTS.map(str::to_owned).to_vec(),
        ring_kib: 8192,
        ..Userland::default()
    };
    let mut spec = parts.spec(lab, "without", &userland)?;
    spec.accel = accel;
    let mut source = spec.boot()?;
    source.wait_ready()?;
    thread::sleep(WARM_UP);
    let destination = spec.incoming()?;
    let migrated = migrate_plainly(&source, &destination)?;
    source.stop()?;
    destination.stop()?;
    into.without.push(f64::from(
        u32::try_from(migrated.downtime_ms).unwrap_or(u32::MAX),
    ));
    Ok(())
}

/// The table, and the line for scripts.
#[must_use]
pub fn blackout_table(blackouts: &Blackouts) -> String {
    let mut lines = vec![
        String::new(),
        "Blackout of a live migration, as QMP reports it (downtime, ms)".to_owned(),
        String::new(),
        format!(
            "  {:<34} {:>4} {:>8} {:>8} {:>17} {:>8}",
            "", "n", "median", "min", "quartiles", "max"
        ),
    ];
    let mut row = |name: &str, values: &[f64]| {
        if let Some(spread) = Spread::of(values) {
            lines.push(format!(
                "  {:<34} {:>4} {:>8.1} {:>8.1} {:>17} {:>8.1}",
                name,
                values.len(),
                spread.median,
                spread.min,
                format!(
                    "{:.1} - {:.1}",
                    spread.lower_quartile, spread.upper_quartile
                ),
                spread.max
            ));
        }
    };
    row("recorded by vmtrail, drained", &blackouts.with);
    row("no agent, no ports, no reader", &blackouts.without);
    row("of the first: held for the drain", &blackouts.drain);
    lines.push(String::new());
    if let (Some(with), Some(without)) =
        (Spread::of(&blackouts.with), Spread::of(&blackouts.without))
    {
        lines.push(format!(
            "ratio blackout {:.3}",
            with.median / without.median.max(0.5)
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_what_it_says() {
        let spread = Spread::of(&[4.0, 1.0, 3.0, 2.0, 5.0]).unwrap();
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 3.0, 5.0));
        assert_eq!((spread.lower_quartile, spread.upper_quartile), (2.0, 4.0));
        assert_eq!(Spread::of(&[1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Spread::of(&[7.0]).unwrap().upper_quartile, 7.0);
        assert!(Spread::of(&[]).is_none());
    }

    #[test]
    fn the_ratio_can_be_read_by_a_script() {
        let table = blackout_table(&Blackouts {
            with: vec![20.0, 30.0, 40.0],
            without: vec![20.0, 20.0, 21.0],
            drain: vec![3.0],
        });
        assert!(
            table.lines().any(|line| line == "ratio blackout 1.500"),
            "{table}"
        );
    }
}
