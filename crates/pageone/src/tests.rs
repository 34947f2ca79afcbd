//! Of the command line as a whole.

use clap::CommandFactory;

use super::*;

#[test]
fn help_is_shown_however_it_is_asked_for() {
    let parse = |line: &str| parse(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
    let said = |line| parse(line).err().map(|said| (said.kind(), said.to_string())).unwrap();
    for (asked, same) in [
        ("pageone help --help", "pageone help"),
        ("pageone help -h", "pageone help"),
        ("pageone help ksm status --help", "pageone help ksm status"),
        ("pageone ksm help --help", "pageone ksm help"),
    ] {
        assert_eq!(said(asked), said(same), "{asked}");
        assert_eq!(said(asked).0, clap::error::ErrorKind::DisplayHelp, "{asked}");
    }
    assert_eq!(said("pageone help no").0, clap::error::ErrorKind::InvalidSubcommand);
    assert!(matches!(parse("pageone run help --help").unwrap().command, Command::Run(_)));
}

/// What a terminal does to it is no matter: neither a man page nor the reference has its lines.
#[test]
fn help_keeps_within_a_narrow_terminal() {
    let mut commands = vec![Cli::command()];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands().cloned());
        let help = command.clone().term_width(60).render_long_help().to_string();
        for line in help.lines().filter(|line| line.contains(' ') && !line.starts_with("Usage: ")) {
            assert!(line.chars().count() <= 60, "{}: {line}", command.get_name());
        }
    }
}

#[test]
fn kernels_with_other_pages_are_refused_by_a_sentence() {
    let check = |words: &[&str], found| {
        let cli = Cli::try_parse_from([&["pageone"], words].concat()).unwrap();
        check_pages(&cli.command, found)
    };
    for words in [&["estimate", "1"][..], &["daemon"], &["pool", "list"]] {
        assert!(check(words, 4096).is_ok());
        let error = check(words, 65_536).unwrap_err();
        assert_eq!(Code::of(&error), Code::HostLacks);
        assert!(error.to_string().starts_with("this kernel has pages of 65536 bytes"), "{error}");
    }
    assert!(check(&["doctor"], 65_536).is_ok() && check(&["run", "true"], 16_384).is_ok());
}

fn text_of(file: &str) -> String {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    std::fs::read_to_string(root.join(file)).unwrap()
}

#[test]
fn what_estimate_takes_for_costs_stands_among_the_benchmarks() {
    let (bench, code) = (text_of("docs/benchmarks.md"), text_of("crates/estimate/src/cost.rs"));
    let cells = |row: &str| -> Vec<String> {
        let line = bench.lines().find_map(|line| line.strip_prefix("| ")?.strip_prefix(row)).unwrap();
        line.split('|').map(|cell| cell.trim().trim_matches('*').to_owned()).filter(|cell| !cell.is_empty()).collect()
    };
    let (merged, scanned) = (cells("CPU µs a merged page"), cells("CPU ns a page and scan"));
    let (ours, ksm) = ([&merged[0], &scanned[0]], [&merged[1], &scanned[2]]);
    let row = format!(
        "| costs, CPU | {} µs for a merged page; {} ns for each page in each later scan | {} µs; {} ns |",
        ksm[0], ksm[1], ours[0], ours[1]
    );
    assert!(text_of("docs/guide/estimate.md").contains(&row), "{row}");
    for (name, figures) in [("KSM", ksm), ("PAGEONE", ours)] {
        for (what, figure) in ["MERGE_US", "SCAN_NS"].iter().zip(figures) {
            let constant = format!("\nconst {name}_{what}: f64 = {figure}");
            assert!(code.contains(&constant), "{constant}");
        }
    }
}

#[test]
fn one_limit_of_mappings_is_advised() {
    let advised = kmem::procfs::ADVISED_MAP_COUNT.to_string();
    for (file, before) in [
        ("docs/guide/operations.md", "`vm.max_map_count` to "),
        ("docs/guide/troubleshooting.md", "`sysctl vm.max_map_count="),
    ] {
        let text = text_of(file);
        let told = text.split(before).nth(1).unwrap();
        assert_eq!(told.split(|c: char| !c.is_ascii_digit()).next(), Some(&*advised), "{file}");
    }
}
