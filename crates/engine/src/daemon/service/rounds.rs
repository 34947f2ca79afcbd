//! Rounds: connections that have messages, user by user.

use std::collections::BTreeMap;
use std::time::Instant;

use claims::Owner;

use super::Service;
use crate::config::bounds::ROUND;
use crate::core::content::index::ClientId;

/// Connections that have messages, or work that is left.
#[derive(Default)]
pub(super) struct Ready {
    pub(super) handshakes: Vec<u32>,
    pub(super) clients: Vec<ClientId>,
}

/// One connection that is ready.
#[derive(Clone, Copy)]
enum Turn {
    Handshake(u32),
    Client(ClientId),
}

impl Service {
    /// Serves ready connections, each user's for [`ROUND`]; the others come again.
    pub(super) fn round(&mut self, mut ready: Ready) {
        ready.clients.extend(self.unfinished.iter().copied());
        let mut by_user: BTreeMap<Owner, Vec<Turn>> = BTreeMap::new();
        for number in ready.handshakes {
            let Some(handshake) = self.handshakes.get(&number) else { continue };
            by_user.entry(handshake.user.owner).or_default().push(Turn::Handshake(number));
        }
        for number in ready.clients {
            let Some(client) = self.shared.client(number) else {
                self.unfinished.remove(&number);
                continue;
            };
            by_user.entry(client.user.owner).or_default().push(Turn::Client(number));
        }
        for turns in by_user.into_values() {
            self.serve_user(turns);
        }
    }

    /// Takes messages of a user's connections by turns, until none is left or the time is over.
    fn serve_user(&mut self, mut turns: Vec<Turn>) {
        let begin = Instant::now();
        let mut clients = false;
        while !turns.is_empty() {
            turns.retain(|&turn| {
                if begin.elapsed() >= ROUND {
                    return false;
                }
                match turn {
                    Turn::Handshake(number) => self.apart(|service| service.shake_hands(number)),
                    Turn::Client(number) => {
                        clients = true;
                        self.shared.client(number).is_some_and(|client| self.serve_one(&client))
                    }
                }
            });
        }
        if clients {
            self.shared.charge_agents();
        }
    }
}
