//! `pageone generate`: man pages and shell completions, from the definition of the command line.
//! The packages are built with it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::{Generator, Shell};
use output::Existing;

/// Options of `pageone generate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory to write `man1/` and `completions/` to
    dir: PathBuf,
}

/// Writes them all.
pub(crate) fn run(args: &Args) -> Result<()> {
    let man = args.dir.join("man1");
    let completions = args.dir.join("completions");
    for dir in [&man, &completions] {
        output::directory::make(dir, 0o777).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let mut command = crate::Cli::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, "pageone", &mut text);
        output::file::write(&completions.join(shell.file_name("pageone")), Existing::Replaced, &text)?;
    }
    command.build();
    pages(&command, &man)
}

/// The page of a command, and those of its subcommands.
fn pages(command: &clap::Command, dir: &Path) -> Result<()> {
    let name = command.get_bin_name().unwrap_or(command.get_name()).replace(' ', "-");
    let path = dir.join(format!("{name}.1"));
    let mut page = Vec::new();
    let titled = command.clone().display_name(name);
    clap_mangen::Man::new(titled).render(&mut page)?;
    output::file::write(&path, Existing::Replaced, &page)?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        pages(sub, dir)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_man_page_and_every_shell_its_completions() {
        let dir = tempfile::tempdir().unwrap();
        run(&Args { dir: dir.path().into() }).unwrap();
        let page = |name: &str| std::fs::read_to_string(dir.path().join("man1").join(name)).unwrap();
        assert!(page("pageone.1").contains("Exit codes"));
        assert!(page("pageone-daemon.1").contains("max\\-cpu"));
        assert!(page("pageone-config-check.1").contains("pageone config check"));
        assert!(!dir.path().join("man1/pageone-generate.1").exists(), "it is hidden");
        for name in ["pageone.bash", "_pageone", "pageone.fish"] {
            let text = std::fs::read_to_string(dir.path().join("completions").join(name)).unwrap();
            assert!(text.contains("checkpoint"), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = |name: &str| format!("{:#}", run(&Args { dir: dir.path().join(name) }).unwrap_err());
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(error("file/below").starts_with("cannot create "), "{}", error("file/below"));
        // A directory has the name of a file.
        std::fs::create_dir_all(dir.path().join("shells/completions/pageone.bash")).unwrap();
        assert!(error("shells").ends_with("pageone.bash is a directory, which nothing replaces: name another file"));
        std::fs::create_dir_all(dir.path().join("pages/man1/pageone.1")).unwrap();
        assert!(error("pages").contains("pageone.1 is a directory, "), "{}", error("pages"));
    }
}
