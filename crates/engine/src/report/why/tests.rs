use super::*;

fn code(known: &Known<'_>) -> Option<Reason> {
    why(known).map(|why| {
        assert!(why.text.len() > 30 && !why.text.contains("  "), "{why:?}");
        why.code
    })
}

#[test]
fn the_first_reason_that_holds_is_told() {
    let metrics = ClientMetrics {
        region_bytes: 1 << 30,
        pages_merged: 100,
        pages_unshared: 1000,
        pages_volatile: 900,
        full_scans: 9,
        ..ClientMetrics::default()
    };
    let none = ClientMetrics::default();
    let huge = ClientMetrics { pages_kept_huge: 2000, ..metrics.clone() };
    let short = ClientMetrics { max_map_count_binds: true, ..metrics.clone() };
    let busy = ClientMetrics { pages_volatile: 5000, ..metrics.clone() };
    let new = ClientMetrics { full_scans: 1, ..metrics.clone() };
    let well = ClientMetrics { pages_merged: 99_999, ..metrics.clone() };
    let base = || Known { metrics: Some(&metrics), state: ClientState::Merging, ..Known::default() };
    let cases = [
        (Known { state: ClientState::Detached, ..base() }, Reason::Detached),
        (Known { state: ClientState::Disconnected, ..base() }, Reason::Disconnected),
        (Known { state: ClientState::Stalled, is_frozen: true, ..base() }, Reason::Stalled),
        (Known { is_frozen: true, refused: Some("x"), ..base() }, Reason::Frozen),
        (Known { refused: Some("its memory is pinned (VmPin 7 KiB)"), is_pinned: true, ..base() }, Reason::Pinned),
        (Known { refused: Some("its memory cannot be read at all"), ..base() }, Reason::Refused),
        (Known { host_paused: Some("1 MiB of memory and swap space are available"), ..base() }, Reason::Headroom),
        (Known { domain_paused: Some("the store has reached its last segment"), ..base() }, Reason::Paused),
        (Known { metrics: Some(&none), shared_bytes: 1 << 30, ..base() }, Reason::Shared),
        (Known { metrics: Some(&none), ..base() }, Reason::Unmarked),
        (Known { metrics: Some(&short), ..base() }, Reason::Mappings),
        (
            Known { limited: Some((Reason::Files, "its limit of open files leaves room for 3")), ..base() },
            Reason::Files,
        ),
        (Known { metrics: Some(&new), ..base() }, Reason::New),
        (Known { metrics: Some(&huge), ..base() }, Reason::KeptHuge),
        (Known { due: 4000, cpu_limit: Some(2.0), ..base() }, Reason::Budget),
        (Known { due: 4000, ..base() }, Reason::Pending),
        (Known { metrics: Some(&busy), cooling: Some("nfs4"), ..base() }, Reason::Cooling),
        (Known { metrics: Some(&busy), ..base() }, Reason::Volatile),
        (base(), Reason::Unique),
    ];
    for (known, expected) in cases {
        assert_eq!(code(&known), Some(expected));
    }
    assert_eq!(code(&Known { metrics: Some(&well), ..base() }), None, "nearly all is merged");
}
