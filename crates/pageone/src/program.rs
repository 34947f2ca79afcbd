//! Whether a program can be started, before anything is done for it.
//!
//! By the rules of execvp(3): a name without a slash is looked for in PATH. Then by those of
//! execve(2): a file that begins with `#!` is started by the interpreter that its first line names,
//! which may be such a file itself. What the kernel finds besides, in the end, `exec` says.
//!
//! Source: `load_script()` in fs/binfmt_script.c of the kernel.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Bytes of a file that the kernel looks at (`BINPRM_BUF_SIZE`).
const HEAD: u64 = 256;
/// Interpreters of interpreters that it goes through, at most.
const DEPTH: usize = 5;

/// Whether a program can be started.
///
/// # Errors
///
/// That of the start which is not to be tried. One with a sentence of its own is about the
/// interpreter.
pub(crate) fn check(program: &OsStr) -> io::Result<()> {
    if program.is_empty() || program.as_bytes().contains(&b'/') {
        return check_file(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut failed = ErrorKind::NotFound.into();
    for directory in std::env::split_paths(&path) {
        match check_file(&directory.join(program)) {
            Ok(()) => return Ok(()),
            // Another directory may have one that can be; else the most telling error is told.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => failed = error,
            Err(error) if error.get_ref().is_some() && failed.kind() == ErrorKind::NotFound => failed = error,
            Err(_) => {}
        }
    }
    Err(failed)
}

/// Whether a file can be started, and its interpreters.
fn check_file(file: &Path) -> io::Result<()> {
    executable(file)?;
    let mut script = file.to_owned();
    for _ in 0..DEPTH {
        let Some(interpreter) = interpreter(&script) else { break };
        executable(&interpreter).map_err(|error| {
            let why = match error.kind() {
                ErrorKind::NotFound => "is not there".into(),
                _ => format!("cannot be run: {error}"),
            };
            let line = if script == file {
                "its first line".into()
            } else {
                format!("the first line of {}", script.display())
            };
            let said = format!("{line} names the interpreter {}, which {why}", interpreter.display());
            io::Error::new(error.kind(), said)
        })?;
        script = interpreter;
    }
    Ok(())
}

/// Whether this account may execute a file, which is one.
fn executable(file: &Path) -> io::Result<()> {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    accessat(CWD, file, Access::EXEC_OK, AtFlags::EACCESS)?;
    if file.is_file() { Ok(()) } else { Err(ErrorKind::PermissionDenied.into()) }
}

/// The interpreter of a script. `None`: the file is none, or only the kernel can read it.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut head = Vec::new();
    File::open(script).ok()?.take(HEAD).read_to_end(&mut head).ok()?;
    named(&head).map(|name| OsStr::from_bytes(name).into())
}

/// The interpreter that a file's first bytes name. The name ends within them, before the line does.
fn named(head: &[u8]) -> Option<&[u8]> {
    let line = head.strip_prefix(b"#!")?;
    let is_whole = head.len() < HEAD as usize;
    let (line, is_whole) = match line.iter().position(|&byte| byte == b'\n') {
        Some(end) => (&line[..end], true),
        None => (line, is_whole),
    };
    let begin = line.iter().position(|byte| !b" \t".contains(byte))?;
    let name = &line[begin..];
    match name.iter().position(|byte| b" \t\0".contains(byte)) {
        Some(end) => Some(&name[..end]).filter(|name| !name.is_empty()),
        // The kernel refuses a name that is cut off.
        None => is_whole.then_some(name),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_interpreter_is_the_first_word_of_the_first_line_as_the_kernel_reads_it() {
        let long = |bytes: usize, rest: &str| format!("#!{}{rest}", "x".repeat(bytes));
        for (head, name) in [
            ("#!/bin/sh\n", Some("/bin/sh")),
            ("#! \t/bin/sh -e\n#!/other", Some("/bin/sh")),
            ("#!/bin/sh", Some("/bin/sh")),
            ("#!/bin/sh\r\n", Some("/bin/sh\r")),
            ("#!\n/bin/sh", None),
            ("#! ", None),
            ("#!", None),
            ("# !/bin/sh\n", None),
            ("\u{7f}ELF", None),
            ("", None),
        ] {
            assert_eq!(named(head.as_bytes()), name.map(str::as_bytes), "{head:?}");
        }
        for (text, bytes) in [(long(254, "\n"), None), (long(253, " -e\n"), Some(253)), (long(200, ""), Some(200))] {
            let head = &text.as_bytes()[..text.len().min(HEAD as usize)];
            assert_eq!(named(head).map(<[u8]>::len), bytes, "{text}");
        }
    }

    #[test]
    fn a_script_without_its_interpreter_is_refused_and_the_interpreter_named() {
        let dir = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        };
        let error = |path: &Path| check(path.as_os_str()).map_err(|error| (error.kind(), error.to_string()));
        assert_eq!(error(&script("whole", "#!/bin/sh\n", 0o755)), Ok(()));
        assert_eq!(error(&script("plain", "echo\n", 0o755)), Ok(()), "execvp(3) gives it to a shell");
        let missing = script("missing", "#!/nonexistent/perl -w\n", 0o755);
        let said = "its first line names the interpreter /nonexistent/perl, which is not there".to_owned();
        assert_eq!(error(&missing), Err((ErrorKind::NotFound, said)));
        let through = script("through", &format!("#!{}\n", missing.display()), 0o755);
        let said = format!(
            "the first line of {} names the interpreter /nonexistent/perl, which is not there",
            missing.display()
        );
        assert_eq!(error(&through), Err((ErrorKind::NotFound, said)));
        let denied = script("denied", "x", 0o644);
        let (kind, said) = error(&script("by", &format!("#!{}\n", denied.display()), 0o755)).unwrap_err();
        assert_eq!(kind, ErrorKind::PermissionDenied);
        assert!(said.contains(" cannot be run: Permission denied"), "{said}");
        // One that interprets itself is for the kernel to refuse.
        let own = dir.path().join("own");
        script("own", &format!("#!{}\n", own.display()), 0o755);
        assert_eq!(error(&own), Ok(()));
        assert_eq!(error(dir.path()).unwrap_err().0, ErrorKind::PermissionDenied, "a directory");
    }
}
