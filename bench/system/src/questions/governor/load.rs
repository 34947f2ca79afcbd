//! The load of the `governor` bench: clients that come and go, each with memory a quarter of which
//! all others have too.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::harness::content::{Case, common};
use crate::harness::hold::{Client, Holding};

/// The clients that are there now, the oldest first.
pub(crate) struct Load<'a> {
    program: &'a Path,
    /// How the command of a program becomes that of a client.
    launch: &'a dyn Fn(&Command) -> Result<Command>,
    pages: usize,
    started: usize,
    pub(crate) clients: Vec<Client>,
}

impl<'a> Load<'a> {
    pub(crate) fn new(program: &'a Path, launch: &'a dyn Fn(&Command) -> Result<Command>, pages: usize) -> Self {
        Self { program, launch, pages, started: 0, clients: Vec::new() }
    }

    /// Changes the number of clients: starts new ones and waits until they have filled and marked
    /// their memory, or ends the oldest.
    pub(crate) fn become_so_many(&mut self, count: usize) -> Result<()> {
        if self.clients.len() > count {
            self.clients.drain(..self.clients.len() - count);
        }
        let first = self.clients.len();
        while self.clients.len() < count {
            let holding = Holding { pages: self.pages, case: Case::Quarter, client: self.started, spread: 1 };
            self.started += 1;
            self.clients.push(Client::start((self.launch)(&holding.command(self.program))?)?);
        }
        self.clients[first..].iter_mut().try_for_each(|client| {
            client.wait_ready()?;
            client.obey("mark")
        })
    }

    /// Pages that a perfect merger has merged: each of the common ones, in each client.
    pub(crate) fn mergeable(&self) -> u64 {
        match self.clients.len() {
            0 | 1 => 0,
            count => (count * common(self.pages)) as u64,
        }
    }
}
