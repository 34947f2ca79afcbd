//! A guest's disks: which can be stored, and images over them.
//!
//! A snapshot takes a disk as it is: QEMU writes to a new image over it from the pause on, and
//! nobody changes the old one any more. If the snapshot fails, what was written since is put into
//! the old image (QEMU's `block-commit`), and the new one goes.
//!
//! Of a raw image a copy is made in the pause, which shares its blocks
//! ([`reflink`](crate::reflink)): the snapshot has the copy, and the guest goes on with the image
//! that it had.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::monitor::{Monitor, MonitorError};
use crate::qcow2;
use crate::reflink;
use guests::words::{Opt, options};

/// How long putting back what was written may take.
const COMMIT: Duration = Duration::from_secs(600);
/// QEMU's name for this work.
const JOB: &str = "pageone-undo";

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
    /// The image that QEMU writes to.
    pub(crate) image: PathBuf,
    /// The image as the command line names it.
    pub(crate) word: String,
    /// Whether the image is raw.
    pub(crate) raw: bool,
}

/// An image over a disk's. Enough to undo it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Overlay {
    disk: String,
    pub(crate) image: PathBuf,
    base_node: String,
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

/// An image as QEMU describes it, the one below it, and so on.
fn images(first: &Value) -> impl Iterator<Item = &Value> {
    let is_there = |image: &&Value| !image.is_null();
    let first = Some(first).filter(is_there);
    std::iter::successors(first, move |image| Some(&image["backing-image"]).filter(is_there))
}

/// The disks that a guest can write to.
///
/// # Errors
/// If one of them cannot be stored.
pub(crate) fn find(qmp: &mut Monitor, words: &[String], directory: &Path) -> Result<Vec<Running>, DiskError> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = qmp.execute("query-block", json!({}))?;
    let mut disks = Vec::new();
    for entry in all.as_array().into_iter().flatten() {
        let inserted = &entry["inserted"];
        if inserted.is_null() || inserted["ro"] == true {
            continue;
        }
        let (device, node) = (text(&entry["device"]), text(&inserted["node-name"]));
        let disk = if device.is_empty() { node.clone() } else { device.clone() };
        let image = text(&inserted["image"]["filename"]);
        let raw = inserted["drv"] == "raw";
        if !raw && inserted["drv"] != "qcow2" {
            return Err(DiskError::Format { disk, format: text(&inserted["drv"]) });
        }
        let full = |name: &str| directory.join(name).canonicalize().ok();
        let Some(path) = full(&image) else { return Err(DiskError::NoFile { disk, image }) };
        // An earlier snapshot has put images over the one that the command line names.
        let chain: Vec<PathBuf> =
            images(&inserted["image"]).filter_map(|image| full(image["filename"].as_str()?)).collect();
        let names = || options(words).filter_map(|option| named(&option));
        let word = chain.iter().find_map(|image| names().find(|name| full(name).as_ref() == Some(image)));
        let Some(word) = word else { return Err(DiskError::NotNamed { disk, image }) };
        let is_node = |option: Opt<'_>| option.name == "blockdev" && named(&option).as_ref() == Some(&word);
        if raw && options(words).any(is_node) {
            return Err(DiskError::RawNode { disk, image });
        }
        if raw && let Err(source) = reflink::try_it(&path) {
            return Err(DiskError::Reflink { disk, image, source });
        }
        let handle = if device.is_empty() { ("node-name".into(), node.clone()) } else { ("device".into(), device) };
        disks.push(Running { handle, node, image: path, word: word.into_owned(), raw });
    }
    Ok(disks)
}

impl Running {
    /// The image that is put over this one for a snapshot of this name. `again`: how many the
    /// snapshot has put there already.
    fn over(&self, name: &str, again: usize) -> PathBuf {
        let safe = file_name(name);
        if self.raw {
            // It is the same one each time, with other bytes.
            let stem = self.image.file_stem().unwrap_or_default().to_string_lossy();
            return self.image.with_file_name(format!("{stem}.{safe}.raw"));
        }
        let again = if again == 0 { String::new() } else { format!("-{again}") };
        let stem = Path::new(&self.word).file_stem().unwrap_or_default().to_string_lossy();
        self.image.with_file_name(format!("{stem}.{safe}{again}.qcow2"))
    }

    /// Describes the image over it that [`Running::cover`] will make.
    pub(crate) fn overlay(&self, name: &str, again: usize) -> Overlay {
        Overlay { disk: self.handle.1.clone(), image: self.over(name, again), base_node: self.node.clone() }
    }

    /// The image that the snapshot has, when this one is covered.
    pub(crate) fn stored(&self, overlay: &Overlay) -> PathBuf {
        if self.raw { overlay.image.clone() } else { self.image.clone() }
    }

    /// Makes the file that [`Running::cover`] needs. The guard that removes it knows of it already.
    pub(crate) fn make(&self, overlay: &Overlay) -> Result<(), DiskError> {
        let made = match self.raw {
            true => reflink::create(&overlay.image, &self.image),
            false => qcow2::create_over(&overlay.image, &self.image, false),
        };
        made.map_err(|source| DiskError::Make { image: overlay.image.clone(), source })
    }

    /// Lets the guest, which stands, write to a new image from now on, or copies a raw one. The
    /// file is made before the pause.
    pub(crate) fn cover(&self, qmp: &mut Monitor, overlay: &Overlay) -> Result<(), DiskError> {
        if self.raw {
            let (disk, image) = (overlay.disk.clone(), self.image.display().to_string());
            let copied = reflink::copy(&overlay.image, &self.image);
            return copied.map_err(|source| DiskError::Reflink { disk, image, source });
        }
        let (key, value) = &self.handle;
        let mut arguments = json!({ "snapshot-file": overlay.image, "format": "qcow2", "mode": "existing" });
        arguments[key.as_str()] = json!(value);
        if key == "node-name" {
            // A node without a device needs a name for the next time.
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
            arguments["snapshot-node-name"] = json!(format!("pageone-{nanos:x}"));
        }
        qmp.execute("blockdev-snapshot-sync", arguments)?;
        Ok(())
    }
}

impl Overlay {
    /// Refuses a name that another file has: it is another snapshot's.
    pub(crate) fn ensure_new(&self) -> Result<(), DiskError> {
        if !self.image.exists() {
            return Ok(());
        }
        Err(DiskError::Make { image: self.image.clone(), source: std::io::ErrorKind::AlreadyExists.into() })
    }

    /// Puts what was written to the image into the one below, and removes it. The guest may run.
    pub(crate) fn undo(&self, qmp: &mut Monitor) -> Result<(), MonitorError> {
        let all = qmp.execute("query-block", json!({}))?;
        let writes =
            |entry: &&Value| entry["inserted"]["image"]["filename"].as_str().map(Path::new) == Some(&self.image);
        if let Some(entry) = all.as_array().into_iter().flatten().find(writes) {
            let device = entry["device"].as_str().filter(|name| !name.is_empty());
            let device = device.or(entry["inserted"]["node-name"].as_str()).unwrap_or(&self.disk);
            let ours = |job: &&Value| job["device"] == JOB;
            let job = |answer: &Value| answer.as_array().into_iter().flatten().find(ours).cloned();
            // A try that was cut short may have begun it.
            if job(&qmp.execute("query-block-jobs", json!({}))?).is_none() {
                qmp.execute("block-commit", json!({ "job-id": JOB, "device": device, "base-node": self.base_node }))?;
            }
            let ready = |answer: &Value| job(answer).is_none_or(|job| job["ready"] == true);
            qmp.until(("query-block-jobs", "putting back what was written to a disk"), COMMIT, ready)?;
            qmp.execute("block-job-complete", json!({ "device": JOB }))?;
            qmp.until(("query-block-jobs", "putting back what was written to a disk"), COMMIT, |all| {
                job(all).is_none()
            })?;
        }
        // Not there, or nobody's any more. One below another that the guest writes to must stay.
        let all = qmp.execute("query-block", json!({}))?;
        let mut images = all.as_array().into_iter().flatten().flat_map(|entry| images(&entry["inserted"]["image"]));
        if !images.any(|image| image["filename"].as_str().map(Path::new) == Some(&self.image)) {
            let _ = std::fs::remove_file(&self.image);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn a_disk_that_no_clone_could_have_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img").display().to_string();
        std::fs::write(&image, "x").unwrap();
        let refused_as = |option: &str, format: &str, image: &str, word: &str| {
            let inserted = json!({ "node-name": "n", "ro": false, "drv": format, "image": { "filename": image } });
            let all = json!([{ "device": "", "inserted": null }, { "device": "d0", "inserted": inserted }]);
            let words = [option, word].map(String::from);
            find(&mut fake::qemu(move |_| all.clone()), &words, Path::new("/")).map(drop).unwrap_err()
        };
        let refused = |format: &str, image: &str, word: &str| refused_as("-drive", format, image, word);
        let error = refused("vmdk", &image, "file=x");
        assert!(matches!(error, DiskError::Format { .. }), "{error}");
        assert!(error.to_string().starts_with("disk d0 is vmdk, and only qcow2 and raw can be stored"), "{error}");
        // A file system without shared blocks.
        let proc = "/proc/self/cmdline";
        let error = refused("raw", proc, &format!("file={proc}"));
        assert!(matches!(error, DiskError::Reflink { .. }), "{error}");
        assert!(error.to_string().contains("is raw, and this file system cannot copy it at once"), "{error}");
        let error = refused_as("-blockdev", "raw", &image, &format!("raw,node-name=n,file.filename={image}"));
        assert!(matches!(error, DiskError::RawNode { .. }), "{error}");
        assert!(
            error.to_string().ends_with("is raw and named by -blockdev; name it by -drive, or use qcow2"),
            "{error}"
        );
        let error = refused("qcow2", "nbd://host/disk", "file=nbd://host/disk");
        assert!(matches!(error, DiskError::NoFile { .. }), "{error}");
        assert!(
            error.to_string().starts_with("disk d0 is nbd://host/disk, and only files of this host can"),
            "{error}"
        );
        let error = refused("qcow2", &image, "if=none,id=d0");
        assert!(matches!(error, DiskError::NotNamed { .. }), "{error}");
        assert!(error.to_string().contains("is not named on the command line, by file="), "{error}");
        let comma = dir.path().join("a,b.img").display().to_string();
        std::fs::copy(&image, &comma).unwrap();
        let written = comma.replace(',', ",,");
        let error = refused_as("-blockdev", "raw", &comma, &format!("raw,node-name=n,file.filename={written}"));
        assert!(matches!(error, DiskError::RawNode { .. }), "{error}");
        // The image over it: one of another snapshot is there, or there is no room for one.
        let base = dir.path().join("base.qcow2");
        qcow2::create(&base, 1 << 20, None, 0o600).unwrap();
        let overlay = |image: &Path| Overlay { disk: "d0".into(), image: image.into(), base_node: "n".into() };
        let there = overlay(&base).ensure_new().unwrap_err();
        let (handle, node) = (("device".into(), "d0".into()), "n".into());
        let disk = Running { handle, node, image: base.clone(), word: "base.qcow2".into(), raw: false };
        let nowhere = disk.make(&overlay(Path::new("/nonexistent/disk.one.qcow2"))).unwrap_err();
        for error in [there, nowhere] {
            assert!(matches!(error, DiskError::Make { .. }), "{error}");
            assert!(error.to_string().starts_with("cannot make the image /"), "{error}");
        }
    }
}
