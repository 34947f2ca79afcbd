//! The library loaded into a client: announces regions, executes mapping batches.
