//! Free pages of guests: where a guest's RAM lies, when it is swept, and the device that it marks
//! them by.

pub(crate) mod device;
pub(crate) mod layout;
pub(crate) mod state;
