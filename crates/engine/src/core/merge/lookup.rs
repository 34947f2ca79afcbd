//! Looking up: where the contents of neighbouring pages are, by their keys.

use crate::core::content::index::{Index, Place, Seen, Sighting};

/// What is known of a page's content, and its handle.
pub(crate) enum Found {
    /// Nothing was: this page stands for it from now on.
    New(u32),
    /// This page stands for it.
    Own(u32),
    /// It is in another page, or a frame.
    At(u32, Place),
    /// It is on its way out.
    Leaving,
    /// Nothing was, and the index is full.
    Full,
}

/// What look-ups remember from chunk to chunk.
#[derive(Default)]
pub(crate) struct Lookup {
    /// The likely handle of the next content: what was sighted together has consecutive ones.
    hint: u32,
    /// Of the chunk in hand, as far as its contents are known.
    handles: Vec<Option<u32>>,
}

impl Lookup {
    /// Looks up a chunk's keys, all together.
    pub(crate) fn begin(&mut self, index: &Index, keys: &[u64]) {
        index.find(keys, self.hint, &mut self.handles);
    }

    /// Where the content of the chunk's page at `at` was when the chunk began.
    pub(crate) fn place(&self, index: &Index, at: usize, key: u64) -> Option<Place> {
        index.place(self.handles[at]?, key)
    }

    /// Looks at the chunk's page at `at`, which is `here`.
    pub(crate) fn see(&mut self, index: &Index, at: usize, key: u64, here: Sighting) -> Found {
        let handle = match self.handles[at].map(Seen::Known).or_else(|| index.add(key, Place::Sighted(here))) {
            Some(Seen::First(handle)) => return Found::New(handle),
            Some(Seen::Known(handle)) => handle,
            None => return Found::Full,
        };
        self.hint = handle + 1;
        match index.place(handle, key) {
            Some(Place::Sighted(there)) if there == here => Found::Own(handle),
            Some(place) => Found::At(handle, place),
            None => Found::Leaving,
        }
    }
}
