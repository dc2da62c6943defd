//! `vmtrail info`: what is in the trail.
