//! Every figure that the project publishes, and its rivals, in one run.
