//! The object-storage media pool.
