//! Pausing the recycling of a guest's free pages, so that it can be saved or migrated.

use std::sync::Arc;

use crate::backend::agent::device;
use crate::client::Client;
use crate::core::recycle::device::PlugError;
use crate::daemon::engine::Engine;

impl Engine {
    /// Unplugs the device in which a guest marks its free pages: a client, or one whose RAM is a
    /// file of `pageonefs`. When this returns the guest can be saved and migrated, and no mark from
    /// before will ever be applied. Does nothing where it is unplugged already.
    ///
    /// # Errors
    ///
    /// [`PlugError`]: no such client, the guest does not let go, or QEMU refuses.
    pub fn pause(&self, pid: i32) -> Result<(), PlugError> {
        self.files.guests.pause(&self.shared, pid).unwrap_or_else(|| device::pause(&self.shared, &self.find(pid)?))
    }

    /// Plugs the device in again, with an empty pool. Does nothing where it is there.
    ///
    /// # Errors
    ///
    /// [`PlugError`]: no such client, a migration is under way, or QEMU refuses.
    pub fn resume(&self, pid: i32) -> Result<(), PlugError> {
        self.files.guests.resume(&self.shared, pid).unwrap_or_else(|| device::resume(&self.shared, &self.find(pid)?))
    }

    fn find(&self, pid: i32) -> Result<Arc<Client>, PlugError> {
        let found = self.shared.clients().into_iter().find(|c| c.pid == pid);
        found.ok_or(PlugError::NotAClient(pid))
    }
}
