//! `pageone run --snapshots`: what a QEMU needs so that its guest can be stored with its devices.

use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use snapshot::Prepared;

use crate::paths;

/// Adds words and environment to `command`, which starts the program. `dir`: the daemon's
/// directory, if it was named.
pub(super) fn prepare(command: &mut Command, program: &[OsString], dir: Option<PathBuf>) -> Result<Prepared> {
    let text = |word: &OsString| {
        word.clone().into_string().ok().context(
            "a word of its command line is no text; \
                                                                          use UTF-8 in options and file names, \
                                                                          or leave --snapshots out",
        )
    };
    let words = program[1..].iter().map(text).collect::<Result<Vec<String>>>()?;
    let own = std::path::absolute(dir.unwrap_or_else(paths::own_directory).join("guests"))?;
    // Whoever may connect to a guest's monitor controls it.
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&own);
    made.with_context(|| format!("cannot create {}", own.display()))?;
    paths::check_owner(&own, "--dir")?;
    sweep(&own);
    let socket = own.join(format!("{}.qmp", std::process::id()));
    let prepared = snapshot::prepare(Path::new(&program[0]), &words, &socket)?;
    command.args(&prepared.words).env(prepared.variable.0, &prepared.variable.1);
    Ok(prepared)
}

/// Refuses a guest that would write into the image of a snapshot, which could never be run then.
pub(super) fn refuse_stored(words: &[OsString]) -> Result<()> {
    let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let Some(image) = snapshot::stored_image(&words) else { return Ok(()) };
    let image = image.display();
    bail!(
        "nobody may write to {image}, as its mode says: it is the image of a snapshot, which this guest would destroy, or its \
         snapshot was removed. Start it with a new image over that (`qemu-img create -f qcow2 -F qcow2 -b {image} NEW`), or with \
         readonly=on; if no snapshot or image needs it, `chmod u+w {image}`"
    )
}

/// Removes the sockets of guests that were killed, and the locks of their snapshots.
fn sweep(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid =
            name.strip_suffix(".lock").unwrap_or(&name).strip_suffix(".qmp").and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn words_that_are_no_text_are_refused() {
        let words = ["qemu-system-x86_64".into(), OsString::from_vec(b"-name=\xff".to_vec())];
        let error = prepare(&mut Command::new("qemu"), &words, Some("/nonexistent".into())).err().unwrap();
        assert_eq!(
            error.to_string(),
            "a word of its command line is no text; use UTF-8 in options and file \
                                       names, or leave --snapshots out"
        );
    }
}
