//! Scan-rate control from a target scan time and a CPU limit.
