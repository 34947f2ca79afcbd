use super::*;

#[test]
fn two_builds_speak_the_newest_version_that_both_know() {
    for (agent, daemon, spoken) in [(5, 5, 5), (5, 6, 5), (6, 6, 6), (6, 7, 6), (7, 6, 6), (900, 899, 899)] {
        assert_eq!(between(agent, daemon), Ok(spoken), "{agent} with {daemon}");
    }
    assert_eq!((agreed(OLDEST), agreed(VERSION), agreed(VERSION + 1)), (Ok(OLDEST), Ok(VERSION), Ok(VERSION)));
}

#[test]
fn what_is_further_apart_is_told_which_side_to_upgrade() {
    for (agent, daemon) in [(4, 5), (3, 4), (0, 6), (5, 7), (6, 8)] {
        assert_eq!(between(agent, daemon), Err(VersionError::AgentOlder { agent, daemon }));
        assert_eq!(between(daemon, agent), Err(VersionError::DaemonOlder { agent: daemon, daemon: agent }));
    }
    assert_eq!(agreed(u16::MAX), Err(VersionError::DaemonOlder { agent: u16::MAX, daemon: VERSION }));
    let (old, new) = (agreed(OLDEST - 1).unwrap_err().to_string(), agreed(VERSION + 2).unwrap_err().to_string());
    assert!(old.contains("speaks protocol 6, and this daemon 7 and 8: start the program again"), "{old}");
    assert!(new.contains("speaks protocol 9 and 10, and this daemon 7 and 8: upgrade the daemon"), "{new}");
}

#[test]
fn every_pair_of_versions_one_apart_agrees() {
    for version in FIRST..=u16::MAX {
        let next = version.saturating_add(1);
        assert_eq!((between(version, next), between(next, version)), (Ok(version), Ok(version)));
    }
}
