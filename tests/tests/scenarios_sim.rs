//! The simulator in a time that everybody has: some thousand seeds, and every planted bug.
//!
//! More seeds: `cargo sim -- --seeds 100000`; all planted bugs with all their seeds: `cargo sim -- --seeds 10000 --mutations`.

use vmtrail_tests::sim::{Mutation, World, run, run_many};

/// Few enough for an unoptimised build on a busy machine.
const SEEDS: u64 = 400;

/// Seeds within which a planted bug must show in this short run. Those that need a rare weather are left to `cargo sim`.
const MUTATION_SEEDS: u64 = 100;

const RARE: [Mutation; 3] = [
    Mutation::GapSilent,
    Mutation::EpochWithoutChance,
    Mutation::RefusalUnheard,
];

#[test]
fn every_judge_is_silent() {
    let (totals, failures) = run_many(0, SEEDS, None, 2, 1);
    if let Some(failure) = failures.first() {
        let options = World::new(failure.seed, None, false).options().clone();
        panic!(
            "seed {}: {}\n{options}\nreproduce: cargo sim {}",
            failure.seed, failure.violation, failure.seed
        );
    }
    assert_eq!(totals.seeds, SEEDS);
    // A world in which nothing happens would satisfy every judge.
    assert!(totals.crashes > SEEDS / 4, "{totals:?}");
    assert!(totals.committed > SEEDS / 4, "{totals:?}");
    assert!(totals.not_committed > SEEDS / 50, "{totals:?}");
    assert!(totals.entries > 50 * SEEDS, "{totals:?}");
    assert!(totals.forked > 0, "{totals:?}");
}

#[test]
fn a_seed_is_the_same_world_every_time() {
    for seed in [1, 2, 3] {
        assert_eq!(
            run(seed, None, false),
            run(seed, None, false),
            "seed {seed}"
        );
    }
}

#[test]
fn planted_bugs_are_caught_by_the_judge_named_for_them() {
    for mutation in Mutation::ALL {
        if RARE.contains(&mutation) {
            continue;
        }
        let caught = (0..MUTATION_SEEDS / 10).any(|step| {
            let (_, failures) = run_many(step * 10, 10, Some(mutation), 2, usize::MAX);
            failures
                .iter()
                .any(|failure| failure.violation.judge == mutation.judge())
        });
        assert!(
            caught,
            "{mutation:?} was not caught by {:?} within {MUTATION_SEEDS} seeds",
            mutation.judge()
        );
    }
}
