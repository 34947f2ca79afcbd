//! Answers Prometheus over HTTP.
//!
//! ```text
//! listen       connections, at once: bounded in number, time and bytes
//!   answer     a request: who asks, for what, in which format
//!     users    passwords, checked one after the other
//!     figures  the daemon's status, asked for once a second at most
//!   web        TLS and users, of the file of `--web.config.file`
//! ```
//!
//! One thread waits for all of them. Two more work: one asks the daemon, one checks a password. So
//! nobody who is silent or slow delays another, and no flood of requests reaches the daemon.
//!
//! Any account of the host, and guests with user networking, reach an address of the loopback. So
//! names of clients and domains are for who gives a password or a certificate ([`Names`]).
//!
//! The protocols are libraries': hyper (HTTP/1.1), rustls (TLS 1.2 and 1.3), bcrypt.

mod answer;
mod figures;
mod listen;
mod users;
mod web;

pub use answer::Names;
pub use figures::{Ask, Figures};
pub use listen::{Listener, serve};
pub use web::{Watched, WebError};
