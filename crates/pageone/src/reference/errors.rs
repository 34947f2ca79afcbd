//! `errors.md`: the exit codes, and what to do for each kind of failure.

use std::fmt::Write;

use super::{head, wrap};
use crate::exit::Code;

pub(super) fn page() -> String {
    let mut out = head("Exit codes and errors", "the exit codes in `crates/pageone/src/exit.rs`");
    let intro = "An error is printed on standard error behind `pageone:`. It says what failed, then why, each behind a \
                 colon, and what to do. The exit code says its kind.";
    let _ = writeln!(out, "\n{}\n\n| code | meaning | what to do |\n|---|---|---|", wrap(intro, "", ""));
    for code in Code::ALL {
        let _ = writeln!(out, "| {} | {} | {} |", code as u8, code.meaning(), remedy(code));
    }
    for text in [
        "`pageone run` has the exit code of the started program: 127 if it was not found and 126 if it could not be \
         started, as a shell does. A program that cannot be merged runs all the same, and a line on standard error \
         says why.",
        "A command whose output nobody reads any more (`pageone status | head -1`) is ended by SIGPIPE, as `cat` is: \
         a shell calls that 141. A full device is a failure: 1.",
    ] {
        let _ = writeln!(out, "\n{}", wrap(text, "", ""));
    }
    let _ = writeln!(out, "\n## What often stands last in a message\n\n| words | what to do |\n|---|---|");
    for (words, remedy) in CAUSES {
        let _ = writeln!(out, "| {words} | {remedy} |");
    }
    out
}

fn remedy(code: Code) -> &'static str {
    match code {
        Code::Done => "",
        Code::Failed => {
            "do what the message says; `doctor` ends so when something is in the way of merging, and its lines say what"
        }
        Code::Usage => "`pageone COMMAND --help` shows the options",
        Code::NoDaemon => "start one with `pageone daemon`, or name the directory of the one that runs with `--dir`",
        Code::NoClient => "`pageone status` lists the clients, `pgrep -a` the processes; `pageone run` starts a client",
        Code::Configuration => "correct the key that the message names; `pageone config check` looks at the file alone",
        Code::SecondDaemon => "stop the other one first, or give this daemon a directory of its own with `--dir`",
        Code::HostLacks => "`pageone doctor` says what is missing and how to get it",
        Code::LeftOut => "the message names what was left out and why; the figures are without it",
    }
}

/// Causes whose words are the system's, or that many sentences have in common.
const CAUSES: [(&str, &str); 11] = [
    ("`Permission denied`, `Operation not permitted`", "run it as root, or as the owner of the process or file"),
    ("`No such process`", "the process has ended: look for it with `pgrep -a NAME`"),
    ("`Too many open files`", "raise the limit: `ulimit -n`, or `LimitNOFILE=` of the service"),
    (
        "`Cannot allocate memory`",
        "free memory, or raise `MemoryMax=` of the service, `ulimit -v` or `vm.max_map_count`",
    ),
    ("`Resource temporarily unavailable` at a start", "raise the limit of processes: `ulimit -u`, or `pids.max`"),
    (
        "`No space left on device`",
        "make room: `pageone pool rm POOL NAME` removes a checkpoint, `pageone pool show POOL` says where a pool lies",
    ),
    ("`No such file or directory` below `/proc` or `/sys`", "mount them; in a container, use the host's"),
    (
        "`damaged`, `is not there`, `does not decode`",
        "`pageone pool check POOL` lists all damage, `pageone pool rm` removes what cannot be restored; look at the disk",
    ),
    ("`panicked`, `cannot encode`", "a mistake in PageONE: report it with the whole message"),
    ("QEMU's own words behind `QEMU refuses`", "do what they say, and try again"),
    (
        "a line of the daemon's log that begins with `it` or `its`",
        "an agent broke the protocol and was disconnected: start its program again, so that it loads the installed \
         agent; if the line comes back, another program speaks to the daemon",
    ),
];

#[test]
fn the_page_is_short_and_has_every_exit_code_with_a_remedy() {
    let page = page();
    assert!(page.split_whitespace().count() <= 1500);
    for code in Code::ALL {
        assert!(page.contains(&format!("| {} | {} |", code as u8, code.meaning())), "{code:?}");
        assert!(code == Code::Done || !remedy(code).is_empty(), "{code:?}");
    }
}
