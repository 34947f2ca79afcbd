//! Helpers for the end-to-end tests: real clients, real daemons, real guests.
