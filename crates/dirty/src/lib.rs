//! Sets of dirty frames: what was written since the last look.
