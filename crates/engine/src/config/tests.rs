use super::*;

#[test]
fn the_defaults_are_in_range_and_every_setting_is_explained() {
    Config::default().check().unwrap();
    for setting in SETTINGS {
        assert!(setting.help().ends_with('.') && !setting.help().contains("  "), "{}", setting.key);
    }
}

#[test]
fn an_option_sets_its_key_or_says_what_is_wrong() {
    let mut config = Config::default();
    let mut set = |key: &str, text: &str| {
        let setting = SETTINGS.iter().find(|setting| setting.key == key).unwrap();
        (setting.option.unwrap().set)(&mut config, text)
    };
    set("merge_period", "5").unwrap();
    set("mode", "none").unwrap();
    assert_eq!(set("threads", "two").unwrap_err().key, "threads");
    assert!(set("mode", "fast").unwrap_err().problem.contains("scan-time"));
    assert_eq!((config.merge_period, config.mode), (5.0, Mode::None));
}

#[test]
fn another_configuration_leaves_what_only_a_restart_changes_as_it_is() {
    let running = Config { directory: "/run/here".into(), ..Config::default() };
    assert_eq!(running.clone().keep_fixed(&running), Changes::default());
    let mut other = Config {
        merge_period: 5.0,
        threads: 3,
        direct_io_seconds: 1.0,
        huge_pages: HugePages::Keep,
        ..Config::default()
    };
    let changes = other.keep_fixed(&running);
    assert_eq!(changes.at_once, ["merge_period"]);
    assert_eq!(changes.new_clients, ["huge_pages"]);
    assert_eq!(changes.restart, ["threads", "direct_io_seconds"]);
    assert_eq!((other.merge_period, other.threads, other.direct_io_seconds), (5.0, 0, 30.0));
    assert_eq!(other.directory, running.directory);
}

#[test]
fn a_value_out_of_range_is_named_with_its_range() {
    let problem = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        config.check().unwrap_err().to_string()
    };
    assert_eq!(problem(|c| c.merge_period = 0.0), "merge_period: 0 is not between 0.05 and 86400 seconds");
    assert_eq!(problem(|c| c.exit_when_idle = f64::NAN), "exit_when_idle: NaN is not between 0 and 1000000000 seconds");
    assert_eq!(problem(|c| c.max_cpu = 0.01), "max_cpu: 0.01 is not 0, for none, or between 0.1 and 102400 percent");
    assert_eq!(problem(|c| c.huge_page_share = 101.0), "huge_page_share: 101 is not between 0 and 100 percent");
    assert_eq!(problem(|c| c.threads = 2000), "threads: 2000 is more than 1024");
    assert!(problem(|c| c.target_scan_time = 30.0).contains("the merge period of 20 s"));
}
