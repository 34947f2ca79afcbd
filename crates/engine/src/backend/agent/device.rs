//! Unplugging the device of a client's pool, and plugging it in again: its agent makes the pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::{ToAgent, VERSION};

use crate::client::Client;
use crate::core::recycle::device::{self, ANSWER_TIME, Guest, PlugError, SessionError};
use crate::core::recycle::state::Device;
use crate::users::log_of;
use crate::world::shared::Shared;

/// How long an agent may take to make room in its socket.
const SEND_TIME: Duration = Duration::from_secs(10);
const SEND_STEP: Duration = Duration::from_millis(5);

pub(crate) struct OfClient<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) client: &'a Arc<Client>,
}

impl Guest for OfClient<'_> {
    fn pid(&self) -> i32 {
        self.client.pid
    }

    /// Has the agent forget its pool for a new one.
    fn renew(&self) -> Result<u32, PlugError> {
        let client = self.client;
        let renewed = || client.state().recycling.as_mut().and_then(|recycling| recycling.renewed.take());
        let _late = renewed();
        let deadline = Instant::now() + ANSWER_TIME;
        if !send(self.shared, client, &wire::encode(&ToAgent::RenewPool)) {
            return Err(PlugError::Agent(client.pid));
        }
        while Instant::now() < deadline && client.state().link.is_up() {
            if let Some(descriptor) = renewed() {
                return Ok(descriptor);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(PlugError::Agent(client.pid))
    }

    fn pool_len(&self) -> u64 {
        self.client.state().recycling.as_ref().map_or(0, |recycling| recycling.marks.len())
    }

    fn forget_recycled(&self) {
        let regions: Vec<_> = self.client.state().regions.iter().map(|(&id, region)| (id, region.pages)).collect();
        for (id, pages) in regions {
            for run in device::slices(pages) {
                let mut state = self.client.state();
                let Some(region) = state.regions.get_mut(&id) else { break };
                region.forget_recycled(run);
            }
        }
    }

    fn set_device(&self, device: Device) {
        if let Some(recycling) = &mut self.client.state().recycling {
            recycling.set_device(device);
        }
    }

    fn log(&self, what: &str) {
        log_of!(self.client.user, info, pid = self.client.pid, "{what}");
    }
}

/// Unplugs a client's device, or plugs it in with a new pool.
pub(crate) fn plug(shared: &Shared, client: &Arc<Client>, act: device::Act) -> Result<(), PlugError> {
    let (session, pid) = (client.session()?, client.pid);
    // Its agent would not know the message.
    if client.version < ToAgent::RenewPool.since() {
        let theirs = client.version;
        let why =
            format!("the agent in process {pid} speaks protocol {theirs}, and {VERSION} is needed; start it again");
        return Err(PlugError::NoDevice(why));
    }
    let socket = session.socket().ok_or(SessionError::NoMonitor(pid))?;
    let goes_on = || !shared.stopping() && client.state().link.is_up();
    act(&OfClient { shared, client }, &mut device::monitor(pid, socket, &goes_on)?)
}

/// Sends a message, waiting for room. `false`: client or daemon end, or the time is over.
pub(crate) fn send(shared: &Shared, client: &Client, message: &[u8]) -> bool {
    let deadline = Instant::now() + SEND_TIME;
    while !shared.stopping() && Instant::now() < deadline && client.state().link.is_up() {
        match client.conn.send(message, &[]) {
            Ok(()) => return true,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(SEND_STEP),
            Err(_) => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use kmem::seqpacket::Conn;
    use rustix::fs::SealFlags;
    use serde_json::{Value, json};
    use wire::ToDaemon;
    use wire::recycle::Pool;

    use super::*;
    use crate::client::scanning::tests::client;
    use crate::core::ledger::free_pages::tests::pool;
    use crate::world::shared::tests::shared;

    /// A client whose QEMU is in this state and has no device now, and its agent's end of the
    /// connection.
    fn guest(state: &'static str) -> (Arc<Client>, Conn) {
        let (client, agent) = client();
        let (fd, _map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut fds: Vec<OwnedFd> = vec![fd, ours.into()];
        let announced = ToDaemon::Pool(Pool { extents: Vec::new(), period_ms: 0 });
        assert!(client.apply(announced, &mut fds).is_ok());
        // It ends with the client, which has the other end.
        std::thread::spawn(move || {
            for line in BufReader::new(&theirs).lines().map_while(Result::ok) {
                let asked: Value = serde_json::from_str(&line).unwrap();
                let answer = match asked["execute"].as_str().unwrap() {
                    "query-status" => json!({ "status": state }),
                    _ => json!([]),
                };
                writeln!(&theirs, "{}", json!({ "return": answer, "id": asked["id"] })).unwrap();
            }
        });
        (Arc::new(client), agent)
    }

    #[test]
    fn a_device_that_cannot_come_or_go_is_an_error_with_the_reason() {
        let shared = shared();
        let plain = Arc::new(client().0);
        let why = plug(&shared, &plain, device::unplug).unwrap_err();
        assert!(matches!(&why, PlugError::NoDevice(why) if why.contains("has no device for free pages")), "{why}");

        let (client, _agent) = guest("inmigrate");
        let why = plug(&shared, &client, device::plug_again).unwrap_err();
        assert!(matches!(why, PlugError::Incoming(_)), "{why}");
        let session = client.session().unwrap();
        let why = plug(&shared, &client, device::unplug).unwrap_err();
        assert!(matches!(&why, PlugError::Busy(why) if why.contains("its device is being plugged")), "{why}");
        drop(session);

        let (client, agent) = guest("running");
        drop(agent);
        let why = plug(&shared, &client, device::unplug).unwrap_err();
        assert!(matches!(why, PlugError::Agent(_)), "{why}");
    }
}
