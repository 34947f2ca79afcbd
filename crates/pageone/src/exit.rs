//! The exit codes of `pageone`: the kind of a failure. The error says what failed and what to do.

use checkpoint::SourceError;
use control::client;
use guests::FindError;
use mpool::PoolError;
use snapshot::save::SaveError;

/// What the exit code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NoDaemon = 3,
    NoClient = 4,
    Configuration = 5,
    SecondDaemon = 6,
    HostLacks = 7,
    LeftOut = 8,
}

impl Code {
    /// All codes, in ascending order.
    pub(crate) const ALL: [Code; 9] = [
        Code::Done,
        Code::Failed,
        Code::Usage,
        Code::NoDaemon,
        Code::NoClient,
        Code::Configuration,
        Code::SecondDaemon,
        Code::HostLacks,
        Code::LeftOut,
    ];

    /// Its meaning, as `--help` and the reference page have it.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Code::Done => "done",
            Code::Failed => "failed",
            Code::Usage => "wrong usage",
            Code::NoDaemon => "no daemon answers",
            Code::NoClient => "no such client or process",
            Code::Configuration => "the configuration is wrong",
            Code::SecondDaemon => "another daemon is running, or another writer of KSM's settings",
            Code::HostLacks => "this host or account lacks something",
            Code::LeftOut => "`estimate` left something out",
        }
    }

    /// The code of a failure: that of the first error in its chain which has one.
    pub(crate) fn of(error: &anyhow::Error) -> Code {
        error.chain().find_map(code_of).unwrap_or(Code::Failed)
    }
}

fn code_of(error: &(dyn std::error::Error + 'static)) -> Option<Code> {
    if let Some(coded) = error.downcast_ref::<Coded>() {
        return Some(coded.0);
    }
    if let Some(FindError::None(_) | FindError::Ended { .. }) = error.downcast_ref() {
        return Some(Code::NoClient);
    }
    if let Some(PoolError::Name(_)) = error.downcast_ref() {
        return Some(Code::Usage);
    }
    let gone = matches!(error.downcast_ref(), Some(SourceError::NoProcess { .. }));
    if gone || matches!(error.downcast_ref(), Some(SaveError::NoProcess { .. })) {
        return Some(Code::NoClient);
    }
    match error.downcast_ref::<client::Error>()? {
        client::Error::NoDaemon(_) | client::Error::Silent => Some(Code::NoDaemon),
        client::Error::NoClient(_) => Some(Code::NoClient),
        _ => None,
    }
}

/// The paragraph on exit codes below `pageone --help`.
pub(crate) fn help() -> String {
    let codes = Code::ALL.map(|code| format!("{} {}", code as u8, code.meaning()));
    format!(
        "Exit codes: {}.\n`run` has the exit code of the started program. `doctor` has 1 if something is in the way of \
         merging.",
        codes.join(" · ")
    )
}

/// An error with an exit code of its own.
#[derive(Debug, thiserror::Error)]
#[error("{1}")]
pub(crate) struct Coded(pub(crate) Code, pub(crate) String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_listed_in_order_and_an_error_keeps_its_own() {
        assert!(Code::ALL.iter().enumerate().all(|(at, &code)| at == code as usize));
        let code = |error: anyhow::Error| Code::of(&error.context("while something else was done"));
        assert_eq!(code(Coded(Code::LeftOut, "x".into()).into()), Code::LeftOut);
        assert_eq!(code(PoolError::Name("a b".into()).into()), Code::Usage);
        assert_eq!(code(client::Error::NoDaemon(Vec::new()).into()), Code::NoDaemon);
        assert_eq!(code(client::Error::NoClient("x".into()).into()), Code::NoClient);
        let gone = || std::io::ErrorKind::NotFound.into();
        assert_eq!(code(SourceError::NoProcess { pid: 7, source: gone() }.into()), Code::NoClient);
        assert_eq!(code(SaveError::NoProcess { pid: 7, source: gone() }.into()), Code::NoClient);
        assert_eq!(code(client::Error::Failed("x".into()).into()), Code::Failed);
        assert_eq!(code(anyhow::anyhow!("x")), Code::Failed);
    }
}
