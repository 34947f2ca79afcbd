//! The messages between the daemon and the agent inside a client.
