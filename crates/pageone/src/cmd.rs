//! The subcommands of `pageone`, a file each: its options, and a function that runs it.

pub(crate) mod attach;
pub(crate) mod checkpoint;
pub(crate) mod config;
pub(crate) mod daemon;
pub(crate) mod demo;
pub(crate) mod detach;
pub(crate) mod dirty;
pub(crate) mod doctor;
pub(crate) mod estimate;
pub(crate) mod generate;
pub(crate) mod ksm;
pub(crate) mod metrics;
pub(crate) mod pool;
pub(crate) mod ppr;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod snapshot;
pub(crate) mod status;
pub(crate) mod table;
pub(crate) mod top;

/// Says an error after which the command goes on. `about`: what it is about.
pub(crate) fn warn(about: &str, error: &anyhow::Error) {
    output::note!("{about}{error:#}");
}

/// A word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A name for a checkpoint or a snapshot, as options have it.
pub(crate) fn checkpoint_name(name: &str) -> Result<String, ::checkpoint::BeginError> {
    ::checkpoint::ensure_name(name).map(|()| name.to_owned())
}

/// The option of each command that writes a file which a person names.
#[derive(clap::Args)]
pub(crate) struct Force {
    /// Replace a regular file that is there
    #[arg(long)]
    force: bool,
}

impl Force {
    /// What becomes of a file that is there.
    pub(crate) fn existing(&self) -> output::Existing {
        if self.force { output::Existing::Replaced } else { output::Existing::Kept }
    }
}

/// The option of each command that shows how far it is.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Quiet {
    /// Do not show on a terminal how far it is
    #[arg(long, short)]
    quiet: bool,
}

impl Quiet {
    /// Whether that is asked for.
    pub(crate) fn is_asked(self) -> bool {
        self.quiet
    }

    /// The line that shows it.
    pub(crate) fn progress(self) -> output::Progress {
        output::Progress::new(if self.quiet { output::Shown::Never } else { output::Shown::OnTerminal })
    }
}

/// The option of each command whose answer programs read, too.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Json {
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

impl Json {
    /// Whether that is asked for.
    pub(crate) fn is_asked(self) -> bool {
        self.json
    }

    /// Prints a value as JSON where that is asked for, and else the text, which ends its own lines.
    pub(crate) fn print(self, value: &impl serde::Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        match self.json {
            true => output::line!("{}", serde_json::to_string_pretty(value)?)?,
            false => output::put!("{}", text())?,
        }
        Ok(())
    }

    /// The same in one line.
    pub(crate) fn line(self, value: &impl serde::Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        match self.json {
            true => output::line!("{}", serde_json::to_string(value)?)?,
            false => output::line!("{}", text())?,
        }
        Ok(())
    }

    /// The same beside a file that the command has written. The text ends its own lines.
    pub(crate) fn beside(
        self,
        file: Written,
        value: &impl serde::Serialize,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let text = if self.json { serde_json::to_string(value)? + "\n" } else { text() };
        match file {
            Written::Apart => output::put!("{text}")?,
            Written::ToStdout => text.lines().for_each(|line| output::say(format_args!("{line}"))),
        }
        Ok(())
    }
}

/// Where a command has written a file, which says where it may answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Standard output is for the answer.
    Apart,
    /// Standard output has the file, and standard error the answer.
    ToStdout,
}

impl Written {
    /// By the file.
    pub(crate) fn of(file: &output::OutputFile) -> Self {
        if file.is_stdout() { Self::ToStdout } else { Self::Apart }
    }
}
