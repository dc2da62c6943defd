//! Judges: one per property, each trusting as little as it can of what it judges.

pub mod marks;
