//! The configuration file: TOML, its keys those of [`engine::Config`].

use std::path::Path;

use anyhow::Result;

use crate::{Code, Coded};

/// Read when no `--config` is given, if it is there.
const DEFAULT: &str = "/etc/pageone.toml";

/// Reads a configuration file. What is wrong is named by file, line and key.
pub(crate) fn load(path: Option<&Path>) -> Result<engine::Config> {
    let (path, needed) = match path {
        Some(path) => (path, true),
        None => (Path::new(DEFAULT), false),
    };
    let wrong = |why: String| Coded(Code::Configuration, format!("{}: {why}", path.display()));
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !needed => {
            return Ok(engine::Config::default());
        }
        Err(e) => return Err(wrong(format!("cannot be read: {e}")).into()),
    };
    let config: engine::Config = toml::from_str(&text).map_err(|e| wrong(e.to_string().trim_end().to_string()))?;
    config.check().map_err(|e| wrong(e.to_string()))?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<engine::Config> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(Some(file.path()))
    }

    #[test]
    fn a_file_sets_what_it_names() {
        let config = parse("merge_period = 5\nhuge_pages = \"keep\"\n[domains.web]\nuids = [1000, 1001]\n").unwrap();
        assert_eq!(config.merge_period, 5.0);
        assert_eq!(config.huge_pages, engine::HugePages::Keep);
        assert_eq!(config.domains["web"].uids, [1000, 1001]);
        assert_eq!(config.threads, 0, "the default");
    }

    #[test]
    fn what_is_wrong_is_named_by_line_and_key() {
        let error = format!("{:#}", parse("threads = 2\nmerge_perod = 5\n").unwrap_err());
        assert!(error.contains("line 2") && error.contains("merge_perod") && error.contains("merge_period"), "{error}");
        let error = format!("{:#}", parse("merge_period = 0\n").unwrap_err());
        assert!(error.contains("merge_period") && error.contains("0.05"), "{error}");
        let error = format!("{:#}", parse("huge_page_share = 101\n").unwrap_err());
        assert!(error.contains("huge_page_share: 101") && error.contains("between 0 and 100"), "{error}");
        let error = format!("{:#}", parse("huge_page_share = 50\nhuge_pages = \"keep\"\n").unwrap_err());
        assert!(error.contains("huge_page_share") && error.contains("leave one of the two out"), "{error}");
        let error = format!("{:#}", parse("threads = \"two\"\n").unwrap_err());
        assert!(error.contains("line 1") && error.contains("threads"), "{error}");
        assert!(load(Some(Path::new("/nonexistent/file"))).unwrap_err().to_string().contains("/nonexistent/file"));
    }
}
