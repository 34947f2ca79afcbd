//! Lending: clients of agents and files of mounts share memory, where their domains have one name.
//! Only this folder knows both back ends.
//!
//! ```text
//!   each round:   stores ──▶ slots that changed are looked up; one of each content is lent
//!                 files  ──▶ as ever; what they find new asks clients ([`bridge`])
//!                 join   ──▶ pages of files go to the slots that were lent since
//! ```
//!
//! A lent slot stays where it is, in the clients' store, and is a frame of the files', too. Without
//! such domains a round is the files' alone.

mod bridge;
mod join;
mod loans;
mod stores;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::loans::Lend;
use self::stores::Stores;
use crate::backend::module::merge::Merge;
use crate::backend::module::mounts::{Due, Files};
use crate::backend::module::round;
use crate::world::shared::Shared;

/// The thread of the files: rounds on request, looks when there is news, until the engine stops.
pub(crate) fn run(files: &Arc<Files>, shared: &Arc<Shared>) {
    let mut stores = Stores::default();
    while let Some(due) = files.wait(shared) {
        files.find();
        stores.find(files, shared);
        if due == Due::Round {
            round(files, &stores, shared);
        }
        // A lent frame has no memory of its own: its slot, which counts as merged here, cancels it.
        files.note(shared, stores.pages_lent());
    }
}

fn round(files: &Files, stores: &Stores, shared: &Shared) {
    let all = files.managed();
    let over = || files.is_asked();
    let slots = round::scan(shared, &stores.segments().collect::<Vec<_>>());
    let due = round::scan(shared, &all.values().cloned().collect::<Vec<_>>());
    let headroom = shared.headroom();
    let due: Vec<_> = due.into_iter().filter(|file| headroom.pauses(file.who()).is_none()).collect();
    if headroom.pauses(None).is_some() {
        return;
    }
    round::merge(shared, &slots, Lend::new, over);
    round::merge(shared, &due, |file| Merge::new(shared, file, &all), over);
    for bridge in stores.bridges() {
        join::join(shared, bridge, &all);
    }
}
