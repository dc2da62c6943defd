//! `cargo sim`: one seed in words, many seeds in silence, or the planted bugs.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use vmtrail_tests::sim::{Mutation, World, run, run_many};

/// Failures of one kind that are worth telling.
const ENOUGH: usize = 10;

/// Runs the seeded simulator of the agent's session and the host's decisions.
#[derive(Debug, Parser)]
#[command(name = "cargo sim")]
struct Arguments {
    /// One seed, told step by step.
    #[arg(conflicts_with = "seeds")]
    seed: Option<u64>,
    /// This many seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Every planted bug must be caught, by the judge named for it, within `--seeds` seeds.
    #[arg(long)]
    mutations: bool,
    /// Plant one bug (by its name in `sim/mutation.rs`).
    #[arg(long)]
    mutation: Option<String>,
    /// Threads.
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    threads: usize,
    /// Only the result of one seed.
    #[arg(long)]
    quiet: bool,
}

fn main() -> ExitCode {
    // The alias ends with `--`, and people write another one: `cargo sim -- --seeds 100000`.
    let given = std::env::args()
        .enumerate()
        .filter(|(index, argument)| *index != 1 || argument != "--");
    let arguments = Arguments::parse_from(given.map(|(_, argument)| argument));
    let mutation = match &arguments.mutation {
        None => None,
        Some(name) => {
            let found = Mutation::ALL
                .into_iter()
                .find(|mutation| format!("{mutation:?}") == *name);
            if found.is_none() {
                println!(
                    "there is no mutation {name:?}; there are {:?}",
                    Mutation::ALL
                );
                return ExitCode::FAILURE;
            }
            found
        }
    };
    if let Some(seed) = arguments.seed {
        return one(seed, mutation, !arguments.quiet);
    }
    // A panic is a finding and told as one.
    std::panic::set_hook(Box::new(|_| {}));
    if arguments.mutations {
        return mutations(&arguments);
    }
    many(&arguments, mutation)
}

fn one(seed: u64, mutation: Option<Mutation>, verbose: bool) -> ExitCode {
    println!(
        "seed {seed}: {}",
        World::new(seed, mutation, false).options()
    );
    match run(seed, mutation, verbose) {
        Ok(summary) => {
            println!("seed {seed}: every judge is silent; {summary:?}");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("seed {seed}: {violation}");
            println!("reproduce: {}", command(seed, mutation));
            ExitCode::FAILURE
        }
    }
}

fn many(arguments: &Arguments, mutation: Option<Mutation>) -> ExitCode {
    let (start, count) = (arguments.start, arguments.seeds);
    println!(
        "seeds {start} to {}, {} threads",
        start + count,
        arguments.threads
    );
    let since = Instant::now();
    let (totals, failures) = run_many(start, count, mutation, arguments.threads, ENOUGH);
    let took = since.elapsed();
    println!(
        "{} seeds in {:.1} s ({:.0} a second): {} events, {} trail entries, {} migrations committed, {} not, {} recorders killed, \
         {} VMs put back ({} unseen by any Hello)",
        totals.seeds,
        took.as_secs_f64(),
        f64::from(u32::try_from(totals.seeds).unwrap_or(u32::MAX)) / took.as_secs_f64(),
        totals.events,
        totals.entries,
        totals.committed,
        totals.not_committed,
        totals.crashes,
        totals.forked,
        totals.unseen_forks,
    );
    for failure in &failures {
        println!("seed {}: {}", failure.seed, failure.violation);
        println!("  {}", World::new(failure.seed, mutation, false).options());
        println!("  reproduce: {}", command(failure.seed, mutation));
    }
    if failures.is_empty() {
        println!("every judge is silent");
        ExitCode::SUCCESS
    } else {
        println!("{} seeds failed (it stops at {ENOUGH})", failures.len());
        ExitCode::FAILURE
    }
}

fn mutations(arguments: &Arguments) -> ExitCode {
    let mut missed = 0;
    for mutation in Mutation::ALL {
        let judge = mutation.judge();
        let mut tried = 0;
        let mut caught = None;
        let mut others = 0_u64;
        // In steps, so that other judges' findings do not end the search for the one named.
        while tried < arguments.seeds && caught.is_none() {
            let step = 50.min(arguments.seeds - tried);
            let start = arguments.start + tried;
            let (_, failures) =
                run_many(start, step, Some(mutation), arguments.threads, usize::MAX);
            tried += step;
            others += failures
                .iter()
                .filter(|failure| failure.violation.judge != judge)
                .count() as u64;
            caught = failures
                .into_iter()
                .find(|failure| failure.violation.judge == judge);
        }
        match caught {
            Some(failure) => println!(
                "{mutation:?}: caught by {judge:?} at seed {} ({others} other findings): {}",
                failure.seed, failure.violation.text
            ),
            None => {
                missed += 1;
                println!(
                    "{mutation:?}: NOT caught by {judge:?} within {tried} seeds ({others} other findings)"
                );
            }
        }
    }
    println!(
        "{} of {} planted bugs caught",
        Mutation::ALL.len() - missed,
        Mutation::ALL.len()
    );
    if missed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn command(seed: u64, mutation: Option<Mutation>) -> String {
    match mutation {
        None => format!("cargo sim {seed}"),
        Some(mutation) => format!("cargo sim {seed} --mutation {mutation:?}"),
    }
}
