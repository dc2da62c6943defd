//! Small uses of vmtrail's libraries: each program in `src/bin` is one.
