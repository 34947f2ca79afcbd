//! `pageone pool`: object pools from the command line.

mod kept;
mod rebuild;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use checkpoint::serve::ServeError;
use control::units::size;
use mpool::{Access, Depth, KeyPlace, MediaClass, OpenOptions, Pool, PoolError, Rebuild, Registry};
use serde_json::json;

pub(crate) use self::kept::date;
use crate::cmd::{Json, Quiet};
use crate::paths;

/// How long a program that has the pool open may take to serve readers, or to end.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a checkpoint waits for a program that does not store one.
const MOMENT: Duration = Duration::from_secs(10);
/// Time between two attempts to open a pool.
const RETRY: Duration = Duration::from_millis(20);

/// The directory of the pools' names.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Names {
    /// Directory of the pools' names [environment: PAGEONE_POOLS] [default: /var/lib/pageone/pools
    /// for root, else ~/.local/state/pageone/pools]
    #[arg(long, value_name = "DIR")]
    pools: Option<PathBuf>,
}

impl Names {
    /// The directory.
    pub(crate) fn directory(&self) -> PathBuf {
        let own = || match std::env::var_os("HOME") {
            Some(home) if !rustix::process::geteuid().is_root() => {
                PathBuf::from(home).join(".local/state/pageone/pools")
            }
            _ => "/var/lib/pageone/pools".into(),
        };
        paths::named(self.pools.as_deref(), "PAGEONE_POOLS").unwrap_or_else(own)
    }

    /// The registry.
    pub(crate) fn registry(&self) -> Registry {
        Registry::new(self.directory())
    }

    /// Opens a pool by its name or path.
    pub(crate) fn open(&self, name: &str, access: Access) -> Result<Pool> {
        self.try_open(name, access).map_err(|error| explain(name, error))
    }

    fn try_open(&self, name: &str, access: Access) -> Result<Pool> {
        let path = self.registry().find(name)?;
        Ok(Pool::open(&path, OpenOptions { access, ..OpenOptions::default() })?)
    }

    /// Opens a pool. Waits for programs that store checkpoints in it, as long as they
    /// do, and a moment for others.
    pub(crate) fn open_soon(&self, name: &str, access: Access) -> Result<Pool> {
        let (start, mut until, mut said, mut waits) = (Instant::now(), Instant::now() + MOMENT, false, None);
        loop {
            let busy = match self.try_open(name, access) {
                Err(e) if is_busy(&e) => e,
                opened => return opened,
            };
            waits = waits.or_else(|| self.wait(name));
            if start.elapsed() > PATIENCE && !said {
                output::note!("pool {name} is in use: waiting until the program that has it open ends");
                said = true;
            }
            if Instant::now() > until {
                match checkpoint::serve::list(&self.registry().find(name)?) {
                    Ok(None) => return Err(explain(name, busy)),
                    // It stores checkpoints, or has ended just now.
                    Ok(Some(_)) | Err(ServeError::Broken | ServeError::Failed(_)) => until = Instant::now() + MOMENT,
                    Err(e) => return Err(e.into()),
                }
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Tells who has the pool open, as long as the file is open, that this program waits.
    fn wait(&self, name: &str) -> Option<std::fs::File> {
        Pool::await_turn(&self.registry().find(name).ok()?).ok()
    }

    /// Opens a pool for writing that was closed for others, when each has looked, and had it.
    fn open_again(&self, name: &str) -> Result<Pool> {
        loop {
            std::thread::sleep(RETRY * 3);
            match self.open_soon(name, Access::Exclusive) {
                Err(e) if is_busy(&e) => {}
                opened => return opened,
            }
        }
    }

    /// Reads a pool by its name or path: with `own`, or, while another program stores a checkpoint
    /// in it, with `served`, which gives `None` if nobody serves.
    pub(crate) fn read<T>(
        &self,
        name: &str,
        own: impl FnOnce(Pool) -> Result<T>,
        served: impl Fn(&Path) -> Result<Option<T>, ServeError>,
    ) -> Result<T> {
        let (start, mut waits) = (Instant::now(), None);
        loop {
            let busy = match self.try_open(name, Access::Shared) {
                Ok(pool) => return own(pool),
                Err(e) if is_busy(&e) => e,
                Err(e) => return Err(e),
            };
            waits = waits.or_else(|| self.wait(name));
            match served(&self.registry().find(name)?) {
                Ok(Some(read)) => return Ok(read),
                // The other program begins or ends just now.
                Ok(None) | Err(ServeError::Broken) if start.elapsed() < PATIENCE => std::thread::sleep(RETRY),
                Ok(None) => return Err(explain(name, busy)),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Says who has a busy pool open, and what to do.
fn explain(name: &str, error: anyhow::Error) -> anyhow::Error {
    let Some(PoolError::Busy(path)) = error.downcast_ref() else { return error };
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let pid = std::fs::metadata(path).ok().and_then(|meta| holder(&locks, meta.dev(), meta.ino()));
    let words = pid.and_then(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok()).unwrap_or_default();
    let words: Vec<_> = words.split(|byte| *byte == 0).take(3).map(String::from_utf8_lossy).collect();
    let who = pid.map_or("another program".into(), |pid| format!("process {pid} ({})", words.join(" ").trim()));
    error.context(format!("pool {name} is used by {who}; try again when that has ended"))
}

/// The process that has a lock of the file with this number (`flock(2)`), by `/proc/locks`.
fn holder(locks: &str, dev: u64, ino: u64) -> Option<i32> {
    let file = format!("{:02x}:{:02x}:{ino}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&&*file)).then(|| words[4].parse().ok())?
    };
    locks.lines().find_map(of)
}

/// Whether another program has the pool open.
fn is_busy(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(PoolError::Busy(_)))
}

/// Options of `pageone pool`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    names: Names,
    #[command(subcommand)]
    command: Command,
}

/// Where the key of an encrypted pool is.
#[derive(clap::Args)]
#[group(multiple = false)]
struct KeyArgs {
    /// Its key, which all in it is encrypted with: a file of 32 random bytes, which every command
    /// finds there
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Its key, which all in it is encrypted with: 32 random bytes in the kernel's keyrings, of
    /// type `user` and with this name (description). Every command looks in the session's keyring,
    /// then in the user's (`@u`)
    #[arg(long, value_name = "NAME")]
    kernel_key: Option<String>,
}

impl KeyArgs {
    fn place(&self) -> KeyPlace {
        match &self.kernel_key {
            Some(name) => KeyPlace::Kernel(name.clone()),
            // One of them was given.
            None => KeyPlace::File(self.key_file.clone().unwrap_or_default()),
        }
    }
}

#[derive(clap::Subcommand)]
enum Command {
    /// Make a pool
    Create {
        /// Its name
        name: String,
        /// Directory of its capacity class; a path, made if need be
        #[arg(long, value_name = "DIR")]
        capacity: PathBuf,
        /// Directory of its staging class, on a fast device: what was stored last, the index, maps
        /// and records lie there, and `repack` moves the pages of earlier checkpoints to the
        /// capacity class
        #[arg(long, value_name = "DIR")]
        staging: Option<PathBuf>,
        #[command(flatten)]
        key: Option<KeyArgs>,
    },
    /// Open an encrypted pool with another key from now on, or with the same one in another place.
    /// For another one, the key before must be where it was
    #[command(group = clap::ArgGroup::new("a key").required(true).args(["key_file", "kernel_key"]))]
    Key {
        /// Name, or path of the capacity class
        name: String,
        #[command(flatten)]
        key: KeyArgs,
    },
    /// List the pools
    List {
        #[command(flatten)]
        json: Json,
    },
    /// Remove a pool with all its contents
    Destroy {
        /// Name, or path of the capacity class
        name: String,
        /// Confirm the removal
        #[arg(long)]
        yes: bool,
    },
    /// Give a pool another name
    Rename {
        /// Name, or path of the capacity class
        from: String,
        /// The new name
        to: String,
    },
    /// Add a media class
    Add {
        /// Name, or path of the capacity class
        name: String,
        /// staging
        class: MediaClass,
        /// Its directory, made if need be
        directory: PathBuf,
    },
    /// Go on with a pool that was moved, copied, or restored from a backup in part: its directories
    /// are one pool from now on
    Adopt {
        /// Name, or path of the capacity class
        name: String,
    },
    /// Make superblocks and metadata anew, where a pool is refused because both copies have lost
    /// the same part: keeps every object whose record can be read, and says what is lost
    Rebuild {
        /// Path of the capacity class, or name
        name: String,
        /// Confirm it; without, nothing is done
        #[arg(long)]
        yes: bool,
        /// Free the space that may belong to lost mblocks; else it stays taken
        #[arg(long)]
        free_lost: bool,
        /// Directory of its staging class, if the record of that is lost
        #[arg(long, value_name = "DIR")]
        staging: Option<PathBuf>,
        /// Directory of its memory class, if the record of that is lost
        #[arg(long, value_name = "DIR")]
        memory: Option<PathBuf>,
    },
    /// Show the properties and the usage of a pool
    Show {
        /// Name, or path of the capacity class
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Verify everything that is stored; with exclusive access, repair what can be repaired without
    /// loss
    Check {
        /// Name, or path of the capacity class
        name: String,
        /// Metadata only: do not read the data
        #[arg(long)]
        metadata: bool,
        /// Repair nothing; other programs may read the pool meanwhile
        #[arg(long)]
        read_only: bool,
        /// Open the rest of a pool that has lost metadata or a class; implies --read-only
        #[arg(long)]
        salvage: bool,
        #[command(flatten)]
        json: Json,
    },
    /// List the checkpoints in a pool
    Ls {
        /// Name, or path of the capacity class
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Show the memory of the checkpoints in a pool, and the space that they take: `alone` is what
    /// no other checkpoint has, `rm frees` what removing it frees at once; the rest of what it has
    /// alone is freed by `repack`
    Du {
        /// Name, or path of the capacity class
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Remove a checkpoint
    Rm {
        /// Name, or path of the capacity class
        name: String,
        /// The checkpoint
        checkpoint: String,
    },
    /// Free the space of removed checkpoints in data mblocks of which others need a part: what is
    /// left of those that are half empty moves into new ones
    Repack {
        /// Name, or path of the capacity class
        name: String,
        /// Compress the pages that only older checkpoints have, in frames of zstd. Those of the N
        /// newest checkpoints stay as they are (1 if N is not given; 0 spares none). An older
        /// PageONE refuses such a pool
        #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "1")]
        compress: Option<usize>,
        #[command(flatten)]
        quiet: Quiet,
        #[command(flatten)]
        json: Json,
    },
}

/// Runs a subcommand.
pub(crate) fn run(args: &Args) -> Result<()> {
    let names = &args.names;
    let registry = names.registry();
    match &args.command {
        Command::Create { name, capacity, staging, key } => {
            let pool = match key.as_ref().map(KeyArgs::place) {
                Some(key) => registry.create_encrypted(name, capacity, key)?,
                None => registry.create(name, capacity)?,
            };
            if let Some(path) = staging {
                let what = || format!("{name} is made, but without class staging; `pageone pool add` adds it");
                pool.add_class(MediaClass::Staging, path).with_context(what)?;
            }
            output::put!("{}", show(&pool)?)?;
        }
        Command::Key { name, key } => Pool::set_key(&registry.find(name)?, key.place())?,
        Command::List { json } => list(&registry, *json)?,
        Command::Destroy { name, yes } => {
            ensure!(*yes, "this removes {name} with all that is in it; say --yes if that is what you want");
            registry.destroy(name)?;
        }
        Command::Rename { from, to } => registry.rename(from, to)?,
        Command::Add { name, class, directory } => {
            let pool = names.open(name, Access::Exclusive)?;
            // A pool of an earlier version may have one, and its tmpfs goes with the host.
            let has_memory = || pool.usage().map(|usage| usage.classes.iter().any(|c| c.class == MediaClass::Memory));
            ensure!(
                *class != MediaClass::Memory || has_memory()?,
                "nothing would lie in class memory: only staging can be added"
            );
            pool.add_class(*class, directory)?;
        }
        Command::Adopt { name } => {
            let options = OpenOptions { adopt: true, ..OpenOptions::default() };
            output::put!("{}", show(&Pool::open(&registry.find(name)?, options)?)?)?;
        }
        Command::Rebuild { name, yes, free_lost, staging, memory } => {
            let how = Rebuild { free_lost: *free_lost, staging: staging.clone(), memory: memory.clone() };
            let path = registry.find(name)?;
            ensure!(*yes, "{}", rebuild::warning(&path, &how));
            rebuild::run(&path, how)?;
        }
        Command::Show { name, json } => {
            let pool = names.open(name, Access::Shared)?;
            let text = show(&pool)?;
            json.print(&show_json(&pool)?, || text)?;
        }
        Command::Check { name, metadata, read_only, salvage, json } => {
            let access = if *read_only { Access::Shared } else { Access::Exclusive };
            let path = registry.find(name)?;
            let depth = if *metadata { Depth::Metadata } else { Depth::Data };
            check(
                &Pool::open(&path, OpenOptions { access, salvage: *salvage, ..OpenOptions::default() })?,
                depth,
                *json,
            )?;
        }
        Command::Ls { name, json } => kept::ls(names, name, *json)?,
        Command::Du { name, json } => kept::du(&names.open_soon(name, Access::Shared)?, *json)?,
        Command::Rm { name, checkpoint } => kept::remove(&names.open_soon(name, Access::Exclusive)?, checkpoint)?,
        Command::Repack { name, compress, quiet, json } => kept::repack((names, name), *compress, *quiet, *json)?,
    }
    Ok(())
}

fn list(registry: &Registry, json: Json) -> Result<()> {
    let mut all = Vec::new();
    for (name, path) in registry.list()? {
        let state = match Pool::open(&path, OpenOptions { access: Access::Shared, ..OpenOptions::default() }) {
            Ok(_) => "ready".to_string(),
            Err(mpool::PoolError::Busy(_)) => "in use".into(),
            Err(e) => e.to_string(),
        };
        all.push((name, path, state));
    }
    let one = |(name, path, state): &(String, PathBuf, String)| json!({ "name": name, "path": path, "state": state });
    let line = |(name, path, state): &(String, PathBuf, String)| format!("{name:<24} {:<48} {state}\n", path.display());
    json.print(&all.iter().map(one).collect::<Vec<_>>(), || all.iter().map(line).collect())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn show(pool: &Pool) -> Result<String> {
    use std::fmt::Write;
    let (props, usage) = (pool.props(), pool.usage()?);
    let mut out = String::new();
    let key = props.key.map(|key| format!(" · encrypted, key {key}")).unwrap_or_default();
    writeln!(out, "{} · {} · format {}{key}", props.name, hex(&props.uuid), props.version)?;
    writeln!(out, "mlogs {} · MDCs {} · metadata {}", usage.mlogs, usage.mdcs, size(usage.metadata_used))?;
    for class in usage.classes {
        let io = match (class.present, class.direct_io) {
            (false, _) => "MISSING",
            (true, true) => "direct I/O",
            (true, false) => "no direct I/O here: through the page cache",
        };
        let back = match class.present && !class.gives_back {
            true => " · this file system cannot punch holes: freed space is used again, but not given back",
            false => "",
        };
        writeln!(
            out,
            "{:<9} {} · mblocks {} · data {} · on the medium {} · free {} of {} · {io}{back}",
            class.class,
            class.path.display(),
            class.mblocks,
            size(class.data_bytes),
            size(class.used_bytes),
            size(class.room.free),
            size(class.room.total)
        )?;
    }
    Ok(out)
}

fn show_json(pool: &Pool) -> Result<serde_json::Value> {
    let (props, usage) = (pool.props(), pool.usage()?);
    let classes: Vec<_> = usage
        .classes
        .iter()
        .map(|c| {
            json!({
                "class": c.class, "path": c.path, "present": c.present, "direct_io": c.direct_io,
                "gives_back": c.gives_back, "mblocks": c.mblocks,
                "data_bytes": c.data_bytes, "used_bytes": c.used_bytes, "free_bytes": c.room.free, "total_bytes": c.room.total,
            })
        })
        .collect();
    let (key_file, kernel_key) = match &props.key {
        Some(KeyPlace::File(path)) => (Some(path), None),
        Some(KeyPlace::Kernel(name)) => (None, Some(name)),
        None => (None, None),
    };
    Ok(json!({
        "name": props.name, "uuid": hex(&props.uuid), "created": props.created, "format": props.version,
        "key_file": key_file, "kernel_key": kernel_key,
        "mlogs": usage.mlogs, "mdcs": usage.mdcs, "metadata_bytes": usage.metadata_used, "classes": classes,
    }))
}

fn check(pool: &Pool, depth: Depth, json: Json) -> Result<()> {
    let report = pool.check(depth).context("cannot look at the pool")?;
    let kept = kept::check(pool, depth)?;
    let findings: Vec<_> = report.findings.iter().map(ToString::to_string).chain(kept.iter().cloned()).collect();
    let (mblocks, logs, bytes) = (report.mblocks, report.logs, report.bytes);
    json.print(&json!({ "findings": findings, "mblocks": mblocks, "mlogs": logs, "read_bytes": bytes }), || {
        let lines: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
        format!("{lines}{mblocks} mblocks, {logs} logs, {} of data read\n", size(bytes))
    })?;
    ensure!(report.is_clean() && kept.is_empty(), "{} findings", findings.len());
    Ok(())
}

#[cfg(test)]
mod tests;
