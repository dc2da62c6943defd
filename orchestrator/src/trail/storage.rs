//! Where a trail's files live.
