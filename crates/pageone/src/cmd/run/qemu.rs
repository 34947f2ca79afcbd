//! What a command line of QEMU's says, and the balloon that lets its guest report free memory.
//!
//! Free page reporting needs nothing in the guest but Linux 5.7 or later with its balloon driver.
//! The guest reports free blocks, by default of 2 MiB, and QEMU discards them.

use std::ffi::{OsStr, OsString};
use std::process::Command;

use guests::is_qemu;
use guests::words::parts;

/// The words of a command line, each with the option that it follows, without dashes.
pub(super) fn words(arguments: &[OsString]) -> impl Iterator<Item = (String, String)> {
    let words = || arguments.iter().map(|word| word.to_string_lossy().into_owned());
    let option = |word: String| if word.starts_with('-') { word.trim_start_matches('-').into() } else { String::new() };
    std::iter::once(String::new()).chain(words().map(option)).zip(words())
}

/// Whether the guest starts with the state of another: from a migration or a snapshot.
pub(super) fn loads_state(arguments: &[OsString]) -> bool {
    words(arguments).any(|(option, _)| option == "incoming" || option == "loadvm")
}

/// Whether devices can be plugged only into ports: the machine is a q35.
pub(super) fn needs_port(arguments: &[OsString]) -> bool {
    words(arguments).any(|(option, word)| {
        (option == "machine" || option == "M")
            && parts(&word).any(|part| part.trim_start_matches("type=").split('-').any(|name| name == "q35"))
    })
}

/// Adds a balloon with free page reporting. A balloon of the user's stays as it is; a line says
/// what it lacks.
pub(super) fn add_reporting(command: &mut Command, program: &OsStr, arguments: &[OsString]) {
    if !is_qemu(program) {
        let name = program.to_string_lossy();
        output::note!("free page reporting is for QEMU's x86-64 guests, and {name} is not QEMU");
        return;
    }
    match balloon(arguments) {
        None => drop(command.args(["-device", "virtio-balloon-pci,id=pageone-balloon,free-page-reporting=on"])),
        Some(word) if reports(&word) => {}
        Some(word) => output::note!(
            "{word}: without free-page-reporting=on this balloon does not return what a guest without our module \
             frees; it is left as it is"
        ),
    }
}

/// The word that adds a balloon, if there is one.
fn balloon(arguments: &[OsString]) -> Option<String> {
    let is_balloon =
        |option: &str, word: &str| option == "balloon" || option == "device" && word.contains("virtio-balloon");
    words(arguments).find(|(option, word)| is_balloon(option, word)).map(|(_, word)| word)
}

/// Whether it reports. QEMU takes options as words or as JSON.
fn reports(word: &str) -> bool {
    let word: String = word.chars().filter(|c| !c.is_whitespace() && *c != '"').collect();
    ["=on", "=true", "=yes", ":true", ":on"].iter().any(|on| word.contains(&format!("free-page-reporting{on}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_balloon_is_added_where_there_is_none() {
        let added = |line: &str| {
            let mut command = Command::new("qemu");
            add_reporting(&mut command, OsStr::new("/usr/bin/qemu-system-x86_64"), &split(line));
            command.get_args().count()
        };
        assert_eq!(added("-m 64 -drive file=virtio-balloon"), 2);
        assert_eq!(added("-m 64 -device virtio-balloon-pci"), 0);
        assert_eq!(added("-m 64 -balloon virtio"), 0);
        assert!(reports("virtio-balloon-pci,free-page-reporting=on,id=b") && !reports("virtio-balloon-pci,id=b"));
        assert!(reports(r#"{"driver":"virtio-balloon-pci","free-page-reporting": true}"#));
    }

    #[test]
    fn what_a_command_line_says_is_known() {
        assert!(loads_state(&split("-m 64 -incoming defer")) && loads_state(&split("--loadvm a")));
        assert!(!loads_state(&split("-m 64 -name incoming")));
        for line in ["-M q35", "-machine accel=kvm,type=q35", "--machine pc-q35-7.2,smm=off"] {
            assert!(needs_port(&split(line)), "{line}");
        }
        assert!(!needs_port(&split("-M pc -name q35")));
    }
}
