use clap::Parser;
use monitor::moment::Moment;
use monitor::recording::Writer;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

#[test]
fn a_file_that_is_there_leaves_none_of_the_others_in_the_way_of_the_next_try() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.append(&Moment { time: 1_700_000_000_000, status: None, away: None }).unwrap();
    std::fs::write(at("seen.rec"), writer.into_inner()).unwrap();
    let words = [&at("seen.rec"), "-o", &at("page"), "--csv", &at("tables"), "--json", &at("json")].map(str::to_owned);
    let report = || run(&Line::parse_from(["report".to_owned()].iter().chain(&words)).args);
    std::fs::create_dir(at("tables")).unwrap();
    for taken in ["tables/guests.csv", "json"] {
        std::fs::write(at(taken), "mine").unwrap();
        let error = report().unwrap_err().to_string();
        assert!(error.contains("--force"), "{error}");
        assert_eq!(std::fs::read_to_string(at(taken)).unwrap(), "mine");
        std::fs::remove_file(at(taken)).unwrap();
        assert!(!dir.path().join("page").exists() && !dir.path().join("json").exists());
        assert_eq!(std::fs::read_dir(at("tables")).unwrap().count(), 0);
    }
    report().unwrap();
    assert!(std::fs::read_to_string(at("page")).unwrap().starts_with("<!"));
    assert!(std::fs::read_to_string(at("json")).unwrap().starts_with("{\"format\":1"));
    for name in export::names() {
        assert!(dir.path().join("tables").join(name).metadata().unwrap().len() > 0, "{name}");
    }
}
