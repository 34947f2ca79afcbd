//! `pageone pool`: object pools from the command line.

mod kept;
mod names;
mod rebuild;
mod turns;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use control::units::{counted, size};
use mpool::{Access, Depth, KeyPlace, MediaClass, OpenOptions, Pool, Rebuild, Registry};
use serde_json::json;

pub(crate) use self::kept::date;
pub(crate) use self::names::Names;
pub(crate) use self::turns::{Storing, Turns, keepers, kept};
use crate::cmd::table::{Column, Table, Tabular};
use crate::cmd::{Json, Quiet};
use crate::exit::{Code, Coded};

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
        /// Name, or capacity directory
        name: String,
        #[command(flatten)]
        key: KeyArgs,
    },
    /// List the pools
    List {
        #[command(flatten)]
        answer: Tabular,
    },
    /// Remove a pool with all its contents
    Destroy {
        /// Name, or capacity directory
        name: String,
        /// Confirm the removal
        #[arg(long)]
        yes: bool,
    },
    /// Give a pool another name
    Rename {
        /// Name, or capacity directory
        from: String,
        /// The new name
        to: String,
    },
    /// Add a media class
    Add {
        /// Name, or capacity directory
        name: String,
        /// staging
        class: MediaClass,
        /// Its directory, made if need be
        directory: PathBuf,
    },
    /// Go on with a pool that was moved, copied, or restored from a backup in part: its directories
    /// are one pool from now on
    Adopt {
        /// Name, or capacity directory
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
        /// Name, or capacity directory
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// Verify everything that is stored; with exclusive access, repair what can be repaired without
    /// loss
    Check {
        /// Name, or capacity directory
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
        /// Name, or capacity directory
        name: String,
        #[command(flatten)]
        answer: Tabular,
    },
    /// Show the memory of the checkpoints in a pool, and the space that they take: `alone` is what
    /// no other checkpoint has, `rm frees` what removing it frees at once; the rest of what it has
    /// alone is freed by `repack`
    Du {
        /// Name, or capacity directory
        name: String,
        #[command(flatten)]
        answer: Tabular,
    },
    /// Remove a checkpoint
    Rm {
        /// Name, or capacity directory
        name: String,
        /// The checkpoint
        checkpoint: String,
        #[command(flatten)]
        json: Json,
    },
    /// Free the space of removed checkpoints in data mblocks of which others need a part: what is
    /// left of those that are half empty moves into new ones
    Repack {
        /// Name, or capacity directory
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
        Command::List { answer } => list(&registry, *answer)?,
        Command::Destroy { name, yes } => {
            let why = format!("this removes {name} with all that is in it; say --yes if that is what you want");
            ensure!(*yes, Coded(Code::Usage, why));
            registry.destroy(name)?;
        }
        Command::Rename { from, to } => registry.rename(from, to)?,
        Command::Add { name, class, directory } => {
            let pool = names.open(name, Access::Exclusive)?;
            // A pool of an earlier version may have one, and its tmpfs goes with the host.
            let has_memory = || pool.usage().map(|usage| usage.classes.iter().any(|c| c.class == MediaClass::Memory));
            ensure!(
                *class != MediaClass::Memory || has_memory()?,
                Coded(Code::Usage, "nothing would lie in class memory: only staging can be added".into())
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
            ensure!(*yes, Coded(Code::Usage, rebuild::warning(&path, &how)));
            rebuild::run(&path, how)?;
        }
        Command::Show { name, json } => {
            let pool = names.open(name, Access::Shared)?;
            let text = show(&pool)?;
            json.print(&show_json(&pool)?, || text)?;
        }
        Command::Check { name, metadata, read_only, salvage, json } => {
            let access = if *read_only { Access::Shared } else { Access::Exclusive };
            let options = OpenOptions { access, salvage: *salvage, ..OpenOptions::default() };
            let depth = if *metadata { Depth::Metadata } else { Depth::Data };
            check(&Pool::open(&registry.find(name)?, options)?, depth, *json)?;
        }
        Command::Ls { name, answer } => kept::ls(names, name, *answer)?,
        Command::Du { name, answer } => kept::du(&names.open_soon(name, Access::Shared)?, *answer)?,
        Command::Rm { name, checkpoint, json } => {
            kept::remove(&names.open_soon(name, Access::Exclusive)?, checkpoint, *json)?
        }
        Command::Repack { name, compress, quiet, json } => kept::repack(names.find(name)?, *compress, *quiet, *json)?,
    }
    Ok(())
}

fn list(registry: &Registry, answer: Tabular) -> Result<()> {
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
    answer.print(&all.iter().map(one).collect::<Vec<_>>(), |width| {
        let mut table = Table::new(["pool", "path", "state"].map(Column::Text));
        for (name, path, state) in &all {
            table.row([name.clone(), path.display().to_string(), state.clone()]);
        }
        if all.is_empty() { String::new() } else { table.within(width) }
    })
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
        let (what, path, mblocks) = (class.class, class.path.display(), class.mblocks);
        let [data, used, free, total] =
            [class.data_bytes, class.used_bytes, class.room.free, class.room.total].map(size);
        write!(out, "{what:<9} {path} · mblocks {mblocks} · data {data} · on the medium {used} · ")?;
        writeln!(out, "free {free} of {total} · {io}{back}")?;
    }
    Ok(out)
}

fn show_json(pool: &Pool) -> Result<serde_json::Value> {
    let (props, usage) = (pool.props(), pool.usage()?);
    let classes: Vec<_> = usage
        .classes
        .iter()
        .map(|c| json!({
            "class": c.class, "path": c.path, "present": c.present, "direct_io": c.direct_io,
            "gives_back": c.gives_back, "mblocks": c.mblocks,
            "data_bytes": c.data_bytes, "used_bytes": c.used_bytes, "free_bytes": c.room.free, "total_bytes": c.room.total,
        }))
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
    let (kept, written) = kept::check(pool, depth);
    let findings: Vec<_> = report.findings.iter().map(ToString::to_string).chain(kept.iter().cloned()).collect();
    let (mblocks, logs, bytes) = (report.mblocks, report.logs, report.bytes);
    let value = json!({ "findings": findings, "mblocks": mblocks, "mlogs": logs, "read_bytes": bytes });
    json.print(&with_error(value, &written), || {
        let lines: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
        let [mblocks, logs] = [(mblocks, "mblock"), (logs, "log")].map(|(n, word)| counted(n as usize, word));
        format!("{lines}{mblocks}, {logs}, {} of data read\n", size(bytes))
    })?;
    written?;
    ensure!(report.is_clean() && kept.is_empty(), "{}", counted(findings.len(), "finding"));
    Ok(())
}

/// What was done, and why not all of it.
fn with_error(mut value: serde_json::Value, done: &Result<()>) -> serde_json::Value {
    if let Err(error) = done {
        value["error"] = format!("{error:#}").into();
    }
    value
}

#[cfg(test)]
mod tests;
