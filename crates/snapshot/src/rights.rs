//! As whom a clone runs, and how much of its record is done.
//!
//! A record names a program, options, files and an account. Who can write a record must not thereby
//! run programs as root:
//!
//! | the snapshot | the guest runs as | program and options |
//! |---|---|---|
//! | stored here; only its caller and root can change the pool | its source did | the record's |
//! | imported, of a container, or in a pool of others | `--user` says | by a list (`allowed`) |
//! | any, with `--trust` | the caller, or as `--user` says | the record's |
//!
//! Without root all run as the caller. The program must be one that only root or the caller can
//! change, unless `--trust` is given.

mod allowed;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::ours::{foreign, foreign_pool};
use crate::record::Description;
pub use kmem::account::Account;
use kmem::account::end_with_caller;
use kmem::place::{self, Place};

/// Variables that a program of another account inherits: names, and beginnings of names.
const VARIABLES: [&str; 4] = ["PATH", "LANG", "TERM", "TZ"];
const FAMILIES: [&str; 4] = ["LC_", "LD_", "QEMU_", "PAGEONE_"];

/// Why not all is done that a snapshot says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// It came in an archive.
    Imported,
    /// Others can change this, of the pool.
    Place(PathBuf),
    /// Its guest's names were not this host's.
    Elsewhere,
    /// It does not say whose guest it was.
    Old,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Imported => write!(f, "was imported"),
            Self::Elsewhere => {
                write!(f, "is of a guest in a container, with mounts, users, processes or networks of its own")
            }
            Self::Place(path) => write!(f, "lies in a pool that others can change ({})", path.display()),
            Self::Old => {
                write!(f, "was stored by an earlier version of PageONE, which did not note whose guest it was")
            }
        }
    }
}

/// Why no clone is started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum RightsError {
    #[error(
        "this snapshot {0}: say as whom its guests are to run with --user, or take all that it says with --trust, which runs \
         them as you"
    )]
    Whose(Doubt),
    #[error(
        "this snapshot {doubt}, and {word} may reach files, programs or networks of this host: --trust takes all that it says"
    )]
    Word { word: String, doubt: Doubt },
    #[error("{} is no QEMU, and this snapshot {doubt}: --trust runs it", program.display())]
    NotQemu { program: PathBuf, doubt: Doubt },
    #[error("{} is not run: others than you and root can change {}. Take that from them, or use --trust", program.display(), what.display())]
    Program { program: PathBuf, what: PathBuf },
    #[error(
        "this snapshot {0}: its images may show any file of this host, and you may read more than its guest could. --trust \
         copies all that they show"
    )]
    Images(Doubt),
    #[error("only root can run guests as another account: leave --user away")]
    NotRoot,
    #[error("cannot find out whose {} is", .0.display())]
    Look(PathBuf, #[source] io::Error),
}

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// The account that guests run as.
    pub user: Option<Account>,
    /// Whether all is done that the snapshot says.
    pub trust: bool,
}

/// As whom a clone runs, and how much of its record is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    /// As whom.
    pub account: Account,
    /// Its names of files are its own directory's.
    pub(crate) is_confined: bool,
    /// Where root starts it. `None`: where it is itself.
    place: Option<Place>,
}

/// What others can change of a pool's directories.
fn foreign_place(directories: &[PathBuf]) -> Result<Option<PathBuf>, RightsError> {
    let look = |path: &PathBuf| foreign_pool(path).map_err(|source| RightsError::Look(path.clone(), source));
    directories.iter().find_map(|path| look(path).transpose()).transpose()
}

/// The account as which a snapshot's images are copied. Their headers name files, and so does a
/// record: neither leads to what its guest could not read.
///
/// | the snapshot | images are read as |
/// |---|---|
/// | stored here; only its caller and root can change the pool | the guest's account |
/// | imported into such a pool; what was written is in the record | the caller |
/// | any other for root, any in a pool of others | nobody |
/// | any, with `--trust` | the caller |
///
/// # Errors
/// If nobody may.
pub fn reader(description: &Description, directories: &[PathBuf], asked: &Asked) -> Result<Account, RightsError> {
    let look = |source| RightsError::Look("/proc/self".into(), source);
    let own = Rights::own().map_err(look)?.account;
    if asked.trust {
        return Ok(own);
    }
    let is_noted = description.disks.iter().all(|disk| !disk.layers.is_empty());
    let doubt = match (foreign_place(directories)?, &description.source) {
        (Some(place), _) => Some(Doubt::Place(place)),
        // It reads as itself.
        _ if own.uid != 0 => None,
        _ if description.imported => (!is_noted).then_some(Doubt::Imported),
        (_, Some(source)) => source.elsewhere.then_some(Doubt::Elsewhere),
        (_, None) => Some(Doubt::Old),
    };
    match doubt {
        Some(doubt) => Err(RightsError::Images(doubt)),
        None => description.reader().map_err(look),
    }
}

/// Why no clone was tried. What a guest's words start has no more rights than the guest.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum Untried {
    #[error("the guest runs in a container, with mounts, users, processes or networks of its own")]
    Elsewhere,
    #[error("the guest is another account's, and {0} may reach files, programs or networks of this host")]
    Word(String),
    #[error("no program can be started where the guest is")]
    Place(#[from] io::Error),
}

impl Rights {
    /// Those of this process, for what it has written itself.
    ///
    /// # Errors
    /// If `/proc` does not tell.
    pub fn own() -> io::Result<Self> {
        Account::of(std::process::id()).map(Self::of_account)
    }

    /// Those of an account, for what this process has written itself.
    pub(crate) fn of_account(account: Account) -> Self {
        Self { account, is_confined: false, place: None }
    }

    /// Those of a clone that is tried beside the guest, in its place.
    ///
    /// # Errors
    /// None is tried.
    pub(crate) fn of_trial(description: &Description, asked: &Asked) -> Result<Self, Untried> {
        let own = Self::own()?;
        let Some(source) = &description.source else { return Ok(own) };
        if source.elsewhere && !asked.trust {
            return Err(Untried::Elsewhere);
        }
        if source.uid != own.account.uid
            && !asked.trust
            && let Some(word) = allowed::refused(&description.words, &description.disks)
        {
            return Err(Untried::Word(word));
        }
        if own.account.uid != 0 {
            return Ok(own);
        }
        Ok(Self { place: Some(Place::of(source.pid)?), ..Self::of_account(source.account()) })
    }

    /// Those of a snapshot's clones. `directories`: those of its pool.
    ///
    /// # Errors
    /// If no clone may be started so.
    pub fn of(description: &Description, directories: &[PathBuf], asked: Asked) -> Result<Self, RightsError> {
        let own = Self::own().map_err(|source| RightsError::Look("/proc/self".into(), source))?.account;
        let doubt = match foreign_place(directories)? {
            _ if description.imported => Some(Doubt::Imported),
            Some(place) => Some(Doubt::Place(place)),
            None if description.source.as_ref().is_some_and(|source| source.elsewhere) => Some(Doubt::Elsewhere),
            None => description.source.is_none().then_some(Doubt::Old),
        };
        let account = match (asked.user, &description.source, &doubt) {
            (Some(user), ..) if own.uid == 0 => user,
            (Some(_), ..) => return Err(RightsError::NotRoot),
            (None, Some(source), None) if own.uid == 0 => source.account(),
            (None, _, Some(doubt)) if own.uid == 0 && !asked.trust => return Err(RightsError::Whose(doubt.clone())),
            _ => own,
        };
        if asked.trust {
            return Ok(Self::of_account(account));
        }
        let doubt = doubt.filter(|doubt| *doubt != Doubt::Old);
        let program = &description.program;
        if let Some(doubt) = &doubt {
            if !guests::is_qemu(program.as_os_str()) {
                return Err(RightsError::NotQemu { program: program.clone(), doubt: doubt.clone() });
            }
            if let Some(word) = allowed::refused(&description.words, &description.disks) {
                return Err(RightsError::Word { word, doubt: doubt.clone() });
            }
        }
        // One that is not there is said later.
        if let Ok(Some(what)) = foreign(program) {
            return Err(RightsError::Program { program: program.clone(), what });
        }
        Ok(Self { is_confined: doubt.is_some(), ..Self::of_account(account) })
    }

    /// A command that starts a program with these rights.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        if let Some(place) = &self.place {
            place.start(&mut command);
        }
        self.account.start(&mut command);
        command.env_clear().envs(self.environment());
        command
    }

    /// Starts a program that ends with this thread, and with it all that it has started. Where that
    /// takes more rights, a program of the caller's own may leave some behind.
    pub(crate) fn spawn_alone(&self, command: &mut Command) -> io::Result<Child> {
        let command = end_with_caller(command)?;
        match place::spawn_alone(command) {
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied
                    && self.account.uid == rustix::process::geteuid().as_raw() =>
            {
                command.spawn()
            }
            done => done,
        }
    }

    /// What a program inherits: another account is not to read the caller's secrets.
    pub(crate) fn environment(&self) -> impl Iterator<Item = (OsString, OsString)> {
        let all = self.account.uid == rustix::process::geteuid().as_raw();
        let is_kept =
            move |name: &str| VARIABLES.contains(&name) || FAMILIES.iter().any(|first| name.starts_with(first));
        std::env::vars_os().filter(move |(name, _)| all || name.to_str().is_some_and(is_kept))
    }
}

#[cfg(test)]
mod tests;
