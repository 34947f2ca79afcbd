//! The configuration's file.

use super::*;

fn problems(text: &str) -> Vec<String> {
    parse(text).unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn every_problem_is_named_with_its_line_its_key_and_what_would_be_right() {
    let found = problems(
        "merge_perod = 5\nthreads = \"two\"\n# a comment\nmax_cpu = 0.01\nmerge_across_nodes = true\n\n\
         [domains.web]\nuids = \"all\"\n",
    );
    let expected = [
        "line 1: merge_perod: there is no such setting; did you mean merge_period? ",
        "line 2: threads: invalid type: string \"two\", expected usize; write it as in `threads = 0`",
        "line 4: max_cpu: 0.01 is not 0, for none, or between 0.1 and 102400 percent",
        "line 8: domains: invalid type: string \"all\"",
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.starts_with(expected), "{found}");
    }
    let found = problems("threads = 1\n= 5\nreserve_mib = \n");
    assert!(found.len() >= 2 && found[0].starts_with("line 2: this is no TOML"), "{found:?}");
    assert!(problems("nonsense = 1\n")[0].contains("no such setting; `pageone config sample`"));
}

#[test]
fn what_keys_mean_together_is_checked_when_each_is_right() {
    assert_eq!(parse("merge_period = 60\ntarget_scan_time = 30\n").unwrap().1, 2);
    let found = problems("threads = 1\ntarget_scan_time = 30\n");
    assert!(found[0].starts_with("line 2: target_scan_time: 30 s is not between"), "{found:?}");
    assert_eq!(parse("").unwrap(), (Config::default(), 0));
}

fn loaded(text: &str) -> Result<Config> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    load(Some(file.path()), Some(PATIENCE))
}

#[test]
fn a_file_sets_what_it_names() {
    let config = loaded("merge_period = 5\nhuge_pages = \"keep\"\n[domains.web]\nuids = [1000, 1001]\n").unwrap();
    assert_eq!(config.merge_period, 5.0);
    assert_eq!(config.huge_pages, engine::HugePages::Keep);
    assert_eq!(config.domains["web"].uids, [1000, 1001]);
    assert_eq!(config.threads, 0, "the default");
}

#[test]
fn what_is_wrong_is_named_by_line_and_key() {
    let error = format!("{:#}", loaded("threads = 2\nmerge_perod = 5\n").unwrap_err());
    assert!(error.contains("line 2") && error.contains("merge_perod") && error.contains("merge_period"), "{error}");
    let error = format!("{:#}", loaded("merge_period = 0\n").unwrap_err());
    assert!(error.contains("merge_period") && error.contains("0.05"), "{error}");
    let error = format!("{:#}", loaded("huge_page_share = 101\n").unwrap_err());
    assert!(error.contains("huge_page_share: 101") && error.contains("between 0 and 100"), "{error}");
    let error = format!("{:#}", loaded("huge_page_share = 50\nhuge_pages = \"keep\"\n").unwrap_err());
    assert!(error.contains("huge_page_share") && error.contains("leave one of the two out"), "{error}");
    let error = format!("{:#}", loaded("threads = \"two\"\n").unwrap_err());
    assert!(error.contains("line 1") && error.contains("threads"), "{error}");
    assert!(
        load(Some(Path::new("/nonexistent/file")), Some(PATIENCE))
            .unwrap_err()
            .to_string()
            .contains("/nonexistent/file")
    );
    let error = format!("{:#}", loaded(&"#".repeat(2 << 20)).unwrap_err());
    assert!(error.contains("cannot be read: it has 1048577 bytes, and at most 1048576"), "{error}");
    let error = load(Some(Path::new("/dev/zero")), Some(PATIENCE)).unwrap_err().to_string();
    assert!(error.contains("/dev/zero: cannot be read: it has 1048577 bytes, and at most 1048576"), "{error}");
    assert_eq!(load(Some(Path::new("/dev/null")), Some(PATIENCE)).unwrap(), Config::default(), "no settings");
    let error = load(Some(Path::new("/")), Some(PATIENCE)).unwrap_err().to_string();
    assert!(error.contains("/: cannot be read: it is a directory"), "{error}");
}

#[test]
fn a_configuration_comes_by_a_pipe_once_if_its_writer_ends() {
    let dir = tempfile::tempdir().unwrap();
    let [silent, fifo] = ["silent", "fifo"].map(|name| {
        let path = dir.path().join(name);
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        path
    });
    let error = text(&silent, Some(Duration::ZERO)).unwrap_err().to_string();
    assert!(error.contains("has not come in 0 s"), "{error}");
    let error = load(Some(&fifo), None).unwrap_err().to_string();
    assert!(error.contains("cannot be read: it is a FIFO"), "{error}");
    let writer = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::write(fifo, "threads = 3\n").unwrap()
    });
    assert_eq!(load(Some(&fifo), Some(PATIENCE)).unwrap().threads, 3);
    writer.join().unwrap();
}
