//! A guest's disks: which can be stored, and images over them.
//!
//! A snapshot takes a disk as it is: QEMU writes to a new image over it from the pause on, which
//! has the old one's name from then on ([`names`](crate::names)), and nobody changes the old one
//! any more. If the snapshot fails, what was written since is put into the old image (QEMU's
//! `block-commit`), and the new one goes.
//!
//! Of a raw image a copy is made in the pause, which shares its blocks
//! ([`reflink`](crate::reflink)): the snapshot has the copy, and the guest goes on with the image
//! that it had.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kmem::account::Account;
use kmem::peer::Peer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::monitor::{Monitor, MonitorError};
use crate::names::{Names, file, is_written_by, opened_by};
use crate::ours::make_beside;
use crate::qcow2::{self, MAX_IMAGES};
use crate::reflink;
use guests::words::{Opt, options};

/// How long putting back what was written may take.
const COMMIT: Duration = Duration::from_secs(600);
/// What is asked until it has ended, and what it is.
const PUTTING_BACK: (&str, &str) = ("query-block-jobs", "putting back what was written to a disk");

/// Why a guest's disks cannot be stored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each sentence says what it is")]
pub enum DiskError {
    #[error(
        "disk {disk} is {format}, and only qcow2 and raw can be stored: `qemu-img convert -O qcow2` makes one of it"
    )]
    Format { disk: String, format: String },
    #[error(
        "disk {disk} ({image}) is raw, and this file system cannot copy it at once: put it on btrfs or XFS, or convert it \
         (`qemu-img convert -O qcow2`)"
    )]
    Reflink { disk: String, image: String, source: std::io::Error },
    #[error(
        "copying the raw disks would take about {ms} ms, in which the guest stands, for they lie in {pieces} pieces; --max-pause \
             is {max_ms} ms: use --max-pause {more}, put the pieces together (`xfs_fsr`, `btrfs filesystem defragment`), or convert \
             the disks (`qemu-img convert -O qcow2`)", more = ms * 2
    )]
    Slow { ms: u128, pieces: usize, max_ms: u128 },
    #[error("disk {disk} ({image}) is raw and named by -blockdev; name it by -drive, or use qcow2")]
    RawNode { disk: String, image: String },
    #[error(
        "disk {disk} is {image}, and only files of this host can be stored: start the guest with qcow2 or \
             raw images of this host, or store its RAM alone with `pageone checkpoint`"
    )]
    NoFile { disk: String, image: String },
    #[error(
        "disk {disk} ({image}) is not named on the command line, by file= or filename=, or by -hda to -hdd: a clone could not be \
         given one of its own; start the guest again with each image named there"
    )]
    NotNamed { disk: String, image: String },
    #[error(
        "disk {disk}: QEMU does not write to {image}, whose name its words have: another file has that name by now; \
             put the guest's own back, or start it again"
    )]
    Replaced { disk: String, image: String },
    #[error(
        "disk {disk} is {image}, and it cannot be given another name beside: put it on a file system with hard links (ext4, \
             XFS, btrfs and others), in a directory where you may make files"
    )]
    Link { disk: String, image: String, source: std::io::Error },
    #[error("disk {disk}: QEMU would go on writing to {image} when it is stored; start it without copy-on-read")]
    Written { disk: String, image: String },
    #[error("the guest's disks were changed meanwhile, by another client of its QEMU: try again when that is done")]
    Changed,
    #[error(
        "disk {disk} has {images} images, and its QEMU opens all of them at each start: shorten the chain first, as the \
             guide of snapshots says"
    )]
    Long { disk: String, images: usize },
    #[error("cannot make the image {}, which the guest is to write to", image.display())]
    Make { image: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Qmp(#[from] MonitorError),
}

/// A disk of a running guest.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    /// QEMU's words for it: `device` or `node-name`.
    handle: (String, String),
    /// The node that QEMU writes to.
    node: String,
    /// What it is known by: see [`mark`].
    mark: Value,
    /// The image that QEMU writes to, by the name with which the guest is started.
    pub(crate) image: PathBuf,
    /// The image as the command line names it.
    pub(crate) word: String,
    /// Whether the image is raw.
    pub(crate) raw: bool,
    /// About how long copying it takes if it is raw, and the number of its pieces.
    copying: (Duration, usize),
}

/// An image over a disk's. Enough to undo it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Overlay {
    disk: String,
    /// The file that is made: the image, or the copy of a raw disk.
    pub(crate) image: PathBuf,
    base_node: String,
    /// QEMU's name for the image.
    node: String,
    /// The names of the files. `None`: of a raw disk a copy is made.
    names: Option<Names>,
    /// The copy of a raw disk, once it is made: another program may make a file of its name.
    #[serde(default)]
    made: Option<(u64, u64)>,
}

/// A snapshot's name as part of a file's.
pub fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '-' }).collect()
}

/// The path of an image in an option.
pub(crate) fn named<'a>(option: &Opt<'a>) -> Option<Cow<'a, str>> {
    match option.name {
        // The value has no parts: all of it is the path.
        "hda" | "hdb" | "hdc" | "hdd" => Some(option.value.into()),
        "drive" => option.part("file"),
        "blockdev" => option.part("filename").or_else(|| option.part("file.filename")),
        _ => None,
    }
}

/// Bytes that are free where a file is.
fn free(file: &Path) -> u64 {
    rustix::fs::statvfs(file).map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// An image as QEMU describes it, the one below it, and so on.
fn images(first: &Value) -> impl Iterator<Item = &Value> {
    let is_there = |image: &&Value| !image.is_null();
    let first = Some(first).filter(is_there);
    std::iter::successors(first, move |image| Some(&image["backing-image"]).filter(is_there))
}

/// What QEMU says of all disks that a guest can write to.
fn written(qmp: &mut Monitor) -> Result<Vec<Value>, MonitorError> {
    let Value::Array(mut all) = qmp.execute("query-block", json!({}))? else { return Ok(Vec::new()) };
    all.retain(|entry| !entry["inserted"].is_null() && entry["inserted"]["ro"] != true);
    Ok(all)
}

/// What is another when another image is put over a disk, and when it gets another size.
fn mark(inserted: &Value) -> Value {
    json!([inserted["node-name"], inserted["file"], inserted["image"]["virtual-size"]])
}

/// Sees that a guest, which stands, has these disks as they were found.
pub(crate) fn ensure_same(disks: &[Running], qmp: &mut Monitor) -> Result<(), DiskError> {
    let now = written(qmp)?;
    let is_same = now.iter().map(|entry| mark(&entry["inserted"])).eq(disks.iter().map(|disk| disk.mark.clone()));
    if is_same { Ok(()) } else { Err(DiskError::Changed) }
}

/// The disks that a guest can write to. `pid`: QEMU.
///
/// # Errors
/// If one of them cannot be stored.
pub(crate) fn find(qmp: &mut Monitor, pid: i32, words: &[String], directory: &Path) -> Result<Vec<Running>, DiskError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut disks = Vec::new();
    for entry in written(qmp)? {
        let inserted = &entry["inserted"];
        let (device, node) = (text(&entry["device"]), text(&inserted["node-name"]));
        let disk = if device.is_empty() { node.clone() } else { device.clone() };
        // So QEMU describes an image whose header names another file than the one that QEMU has
        // below it. A snapshot does that, and that one was opened by the live name (`names`).
        let is_name = |name: &&str| !name.starts_with("json:");
        let mut known = images(&inserted["image"]).filter_map(|image| image["filename"].as_str());
        let image = known.find(is_name).unwrap_or_default().to_owned();
        let raw = inserted["drv"] == "raw";
        if !raw && inserted["drv"] != "qcow2" {
            return Err(DiskError::Format { disk, format: text(&inserted["drv"]) });
        }
        let full = |name: &str| directory.join(name).canonicalize().ok();
        let Some(path) = full(&image) else { return Err(DiskError::NoFile { disk, image }) };
        let images_there = images(&inserted["image"]).count();
        if images_there > MAX_IMAGES {
            return Err(DiskError::Long { disk, images: images_there });
        }
        // An earlier snapshot has put images over the one that the command line names.
        let chain: Vec<PathBuf> =
            images(&inserted["image"]).filter_map(|image| full(image["filename"].as_str()?)).collect();
        let names = || options(words).filter_map(|option| named(&option));
        let word = chain.iter().find_map(|image| names().find(|name| full(name).as_ref() == Some(image)));
        let Some(word) = word else { return Err(DiskError::NotNamed { disk, image }) };
        let is_own = |option: &Opt<'_>| named(option).as_ref() == Some(&word);
        if raw && options(words).any(|option| is_own(&option) && option.name == "blockdev") {
            return Err(DiskError::RawNode { disk, image });
        }
        let copies = |option: &Opt<'_>| option.part("copy-on-read").is_some_and(|value| value == "on");
        if !raw && options(words).any(|option| is_own(&option) && copies(&option)) {
            return Err(DiskError::Written { disk, image });
        }
        if !std::fs::metadata(&path).and_then(|meta| is_written_by(pid, &meta)).unwrap_or(false) {
            return Err(DiskError::Replaced { disk, image });
        }
        let measured = if raw { reflink::measure(&path) } else { Ok(Default::default()) };
        let copying = measured.map_err(|source| DiskError::Reflink { disk, image, source })?;
        let handle = if device.is_empty() { ("node-name".into(), node.clone()) } else { ("device".into(), device) };
        disks.push(Running { handle, node, mark: mark(inserted), image: path, word: word.into_owned(), raw, copying });
    }
    Ok(disks)
}

/// Refuses raw disks whose copies together take longer than a guest may stand.
pub(crate) fn ensure_fast(disks: &[Running], max: Duration) -> Result<(), DiskError> {
    let time: Duration = disks.iter().map(|disk| disk.copying.0).sum();
    let pieces = disks.iter().map(|disk| disk.copying.1).sum();
    if time <= max {
        return Ok(());
    }
    Err(DiskError::Slow { ms: time.as_millis() + 1, pieces, max_ms: max.as_millis() })
}

/// An image for each disk, which `one` describes: a disk, and the images of those before it.
pub(crate) fn overlays(disks: &[Running], one: impl Fn(&Running, &[Overlay]) -> Overlay) -> Vec<Overlay> {
    let mut all = Vec::new();
    disks.iter().for_each(|disk| all.push(one(disk, &all)));
    all
}

impl Running {
    /// The image that a snapshot of this name has. `again`: how many of the name were there.
    fn stored_name(&self, name: &str, again: usize) -> PathBuf {
        let (named, end) = if self.raw { (self.image.as_path(), "raw") } else { (Path::new(&self.word), "qcow2") };
        let stem = named.file_stem().unwrap_or_default().to_string_lossy();
        let again = if again == 0 { String::new() } else { format!("-{again}") };
        self.image.with_file_name(format!("{stem}.{}{again}.{end}", file_name(name)))
    }

    /// Describes the image over it that [`Running::cover`] will make. Files that are there stay:
    /// other snapshots have them, or they were left when one was cut short. `others`: of other
    /// disks, and not made yet.
    pub(crate) fn overlay(&self, name: &str, others: &[Overlay]) -> Overlay {
        let is_new = |again: &usize| {
            let stored = self.stored_name(name, *again);
            stored.symlink_metadata().is_err() && others.iter().all(|other| other.stored() != stored)
        };
        self.overlay_of(name, (0..2 * MAX_IMAGES).find(is_new).unwrap_or(2 * MAX_IMAGES))
    }

    /// The same, and says if the image does not get the snapshot's name.
    pub(crate) fn first_overlay(&self, name: &str, others: &[Overlay]) -> Overlay {
        let (overlay, first) = (self.overlay(name, others), self.stored_name(name, 0));
        if first.symlink_metadata().is_ok() {
            output::note!(
                "{} stays: a snapshot has it, or had it, or it was left when one was cut short; this one has {}",
                first.display(),
                overlay.stored().display()
            );
        }
        overlay
    }

    fn overlay_of(&self, name: &str, again: usize) -> Overlay {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let number = format!("{nanos:x}-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let stored = self.stored_name(name, again);
        let names = (!self.raw).then(|| Names::new(&self.image, stored.clone(), &number));
        let image = names.as_ref().map_or(stored, |names| names.fresh.clone());
        let (disk, base_node, node) = (self.handle.1.clone(), self.node.clone(), format!("pageone-{number}"));
        Overlay { disk, image, base_node, node, names, made: None }
    }

    /// Makes the files that [`Running::cover`] needs. The guard that removes them knows of them
    /// already. `account`: the guest's.
    pub(crate) fn make(&self, overlay: &mut Overlay, account: &Account) -> Result<(), DiskError> {
        if let Some(names) = &overlay.names {
            let (disk, image) = (overlay.disk.clone(), self.image.display().to_string());
            let linked = make_beside(&overlay.image, account, || names.make());
            linked.map_err(|source| DiskError::Link { disk, image, source })?;
        }
        let made = make_beside(&overlay.image, account, || match &overlay.names {
            None => reflink::create(&overlay.image, &self.image).map(Some),
            Some(names) => qcow2::create_over(&overlay.image, &names.stored, false).map(|()| None),
        });
        overlay.made = made.map_err(|source| DiskError::Make { image: overlay.image.clone(), source })?;
        Ok(())
    }

    /// Lets the guest, which stands, write to a new image from now on, or copies a raw one. The
    /// file is made before the pause.
    pub(crate) fn cover(&self, qmp: &mut Monitor, overlay: &Overlay) -> Result<(), DiskError> {
        let Some(names) = &overlay.names else {
            let (disk, image) = (overlay.disk.clone(), self.image.display().to_string());
            let copied = reflink::copy(&overlay.image, &self.image);
            return copied.map_err(|source| DiskError::Reflink { disk, image, source });
        };
        let (key, value) = &self.handle;
        let mut arguments = json!({ "snapshot-file": overlay.image, "format": "qcow2", "mode": "existing" });
        arguments[key.as_str()] = json!(value);
        arguments["snapshot-node-name"] = json!(overlay.node);
        qmp.execute("blockdev-snapshot-sync", arguments)?;
        // Before the guest goes on: what it writes is found under its disk's name.
        names.settle().map_err(|source| DiskError::Make { image: names.live.clone(), source })?;
        // With copy-on-read it does not open it anew to read alone.
        let is_written = std::fs::metadata(&names.stored).and_then(|meta| is_written_by(Peer::of(&*qmp)?.pid, &meta));
        if is_written.map_err(MonitorError::from)? {
            return Err(DiskError::Written { disk: value.clone(), image: self.image.display().to_string() });
        }
        Ok(())
    }
}

impl Overlay {
    /// The image that the snapshot has.
    pub(crate) fn stored(&self) -> &Path {
        self.names.as_ref().map_or(&self.image, |names| &names.stored)
    }

    /// Whether it is the copy of this disk, which is raw.
    pub(crate) fn is_copy_of(&self, disk: &Running) -> bool {
        self.names.is_none() && self.disk == disk.handle.1
    }

    /// What QEMU says of the disk that writes to the image, if one does.
    fn writer(&self, qmp: &mut Monitor) -> Result<Option<Value>, MonitorError> {
        let all = qmp.execute("query-block", json!({}))?;
        Ok(all.as_array().into_iter().flatten().find(|entry| entry["inserted"]["node-name"] == self.node).cloned())
    }

    /// The job that puts back what is in the image, in the answer to `query-block-jobs`. It has the
    /// image's name: other disks may have jobs of their own.
    fn job<'a>(&self, answer: &'a Value) -> Option<&'a Value> {
        answer.as_array()?.iter().find(|job| job["device"] == self.node)
    }

    /// Before the guest goes on: the image has its disk's name if QEMU writes to it, and else none.
    pub(crate) fn settle(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        let Some(names) = self.names.as_ref().filter(|names| !names.is_settled()) else { return Ok(()) };
        // A command that was killed may have told the job to complete. It would complete after the
        // names were settled: so it completes first.
        let is_ready = self.job(&qmp.execute(PUTTING_BACK.0, json!({}))?).is_some_and(|job| job["ready"] == true);
        if is_ready && qmp.state()? != "running" {
            // QEMU refuses this if the job completes already.
            let _ = qmp.execute("block-job-complete", json!({ "device": self.node }));
            qmp.until(PUTTING_BACK, COMMIT, |all| self.job(all).is_none())?;
        }
        if self.writer(qmp)?.is_none() {
            return self.remove(qmp);
        }
        if let Err(error) = names.settle() {
            // The guest would stand for ever.
            let (fresh, live) = (names.fresh.display(), names.live.display());
            output::note!("a guest writes to {fresh}, which cannot be renamed to {live}; do it: {error}");
        }
        Ok(())
    }

    /// Puts what was written to the image into the one below, and removes it. The guest may run; it
    /// stands for a moment, in which `stands` is called before and behind.
    pub(crate) fn undo(&self, qmp: &mut Monitor, stands: &dyn Fn(bool)) -> Result<(), MonitorError> {
        if let (Some(names), Some(entry)) = (&self.names, self.writer(qmp)?) {
            self.commit((names, &entry), qmp, stands)?;
        }
        self.remove(qmp)
    }

    /// Has QEMU write what the image holds to the base, and switch to that.
    fn commit(
        &self,
        (names, entry): (&Names, &Value),
        qmp: &mut Monitor,
        stands: &dyn Fn(bool),
    ) -> Result<(), MonitorError> {
        let device = entry["device"].as_str().filter(|name| !name.is_empty()).unwrap_or(&self.node);
        // A try that was cut short may have begun it.
        if self.job(&qmp.execute(PUTTING_BACK.0, json!({}))?).is_none() {
            names.let_write()?;
            let arguments = json!({ "job-id": self.node, "device": device, "base-node": self.base_node });
            // QEMU opens the base by its name, to write.
            let begun = names.unsettle().map_err(Into::into).and_then(|()| qmp.execute("block-commit", arguments));
            names.settle()?;
            begun?;
        }
        // What is written meanwhile is put back later: QEMU may abort if there is no room for it.
        let fits = |job: &Value| {
            let number = |name| job[name].as_u64().unwrap_or(0);
            number("len").saturating_sub(number("offset")) <= free(&names.stored)
        };
        let ready = |answer: &Value| self.job(answer).is_none_or(|job| job["ready"] == true && fits(job));
        let answer = qmp.until(PUTTING_BACK, COMMIT, ready)?;
        // A job that fails is gone, too.
        let failed = || MonitorError::NotPutBack(device.to_owned());
        self.job(&answer).ok_or_else(failed)?;
        let ran = qmp.state()? == "running";
        if ran {
            // What it writes from now on is the base's, and so is the name.
            stands(true);
            qmp.execute("stop", json!({}))?;
        }
        let ended = names.unsettle().map_err(MonitorError::from).and_then(|()| {
            qmp.execute("block-job-complete", json!({ "device": self.node }))?;
            qmp.until(PUTTING_BACK, COMMIT, |all| self.job(all).is_none())?;
            self.writer(qmp)?.map_or(Ok(()), |_| Err(failed()))
        });
        // Before it goes on: should QEMU end, nobody takes the image for the newer one.
        self.settle(qmp)?;
        if ran {
            qmp.execute("cont", json!({}))?;
            stands(false);
        }
        ended
    }

    /// Takes the image away, unless QEMU has it: one below another that the guest writes to stays.
    fn remove(&self, qmp: &Monitor) -> Result<(), MonitorError> {
        // QEMU's list of its images may be megabytes, and the guest waits.
        if let Ok(meta) = std::fs::metadata(&self.image)
            && opened_by(Peer::of(qmp)?.pid, &meta)?.next().is_some()
        {
            return Ok(());
        }
        match &self.names {
            Some(names) => names.remove(),
            None => drop(self.remove_copy()),
        }
        Ok(())
    }

    /// Removes the copy of a raw disk that was made, and no other file of its name.
    fn remove_copy(&self) -> std::io::Result<()> {
        let is_there = self.made.is_some() && file(&self.image) == self.made;
        if is_there { std::fs::remove_file(&self.image) } else { Ok(()) }
    }

    /// QEMU has ended: the disk's name is that of the image with all that was written.
    pub(crate) fn end(&self) {
        let ended = self.names.as_ref().map_or_else(|| self.remove_copy(), Names::end);
        if let (Err(error), Some(names)) = (ended, &self.names) {
            let (fresh, live) = (names.fresh.display(), names.live.display());
            output::note!("a guest has ended that wrote to {fresh}, which cannot be renamed to {live}; do it: {error}");
        }
    }

    /// The same some time later. Over a base that another guest has changed since, the image would
    /// show a mixture. That QEMU itself wrote to the base last, for a commit, looks the same.
    pub(crate) fn end_late(&self) {
        match &self.names {
            Some(names) if names.is_base_used() => output::note!(
                "a guest has ended that wrote to {}, and {} was written to later, by its QEMU or by another guest: each may have \
                 what the other lacks; keep both until you know",
                names.fresh.display(),
                names.live.display()
            ),
            _ => self.end(),
        }
    }

    /// Takes away the names by which QEMU, process `pid`, knew the images below, and what was left
    /// of snapshots that were cut short.
    pub(crate) fn sweep(&self, pid: i32) {
        self.names.iter().for_each(|names| names.sweep(pid));
    }

    /// The snapshot has the image below from now on. QEMU holds it by a second descriptor, which no
    /// other shares: by its locks it can commit nothing into it, nor open another file instead.
    pub(crate) fn keep(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        let Some(names) = &self.names else { return Ok(()) };
        let file = json!({ "driver": "file", "filename": names.stored });
        let node = format!("{}-k", self.node);
        let all = json!({ "driver": "qcow2", "node-name": node, "read-only": true, "backing": null, "file": file });
        qmp.execute("blockdev-add", all).map(drop)
    }
}

#[cfg(test)]
mod tests;
