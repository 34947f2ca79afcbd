use super::*;

fn pages(pages: std::ops::Range<u32>) -> Run {
    Run::between(PageNo(pages.start), PageNo(pages.end))
}

/// Four huge pages, the second and third of which are noted, behind 100 small ones.
fn two_of_four(share: f64) -> HugePagesOf {
    let mut huge = HugePagesOf::new((512 - 100) * PAGE_SIZE as u64, 100 + 4 * 512, share).unwrap();
    huge.found(pages(612..612 + 1024));
    huge
}

#[test]
fn a_huge_page_is_given_up_when_more_than_the_share_of_it_can_be_merged() {
    let mut huge = two_of_four(25.0);
    assert_eq!(
        [0, 99, 100, 611, 612, 1635, 1636, 2147].map(|page| huge.keeps(PageNo(page))),
        [false, false, false, false, true, true, false, false]
    );
    for page in 612..612 + 128 {
        assert_eq!(huge.can_merge(PageNo(page)), None);
        assert_eq!(huge.can_merge(PageNo(page)), None, "one page counts once");
    }
    assert_eq!(huge.can_merge(PageNo(1124)), None, "it is in another huge page");
    assert_eq!(huge.kept(), 129);
    assert_eq!(huge.can_merge(PageNo(1000)).unwrap(), (612..612 + 128).chain([1000]).map(PageNo).collect::<Vec<_>>());
    assert!(!huge.keeps(PageNo(612)) && !huge.keeps(PageNo(1123)) && huge.keeps(PageNo(1124)));
    assert_eq!(
        huge.can_merge(PageNo(1001)),
        Some(vec![PageNo(1001)]),
        "it was looked at before the huge page was given up"
    );
    assert_eq!(huge.kept(), 1);
}

#[test]
fn what_is_no_huge_page_any_more_is_given_up() {
    let mut huge = two_of_four(50.0);
    for page in [612, 1123, 1124] {
        assert_eq!(huge.can_merge(PageNo(page)), None);
    }
    assert!(huge.lost(pages(0..612)).is_empty(), "the pages before");
    assert_eq!(huge.lost(pages(700..701)), [612, 1123].map(PageNo));
    assert!(huge.lost(pages(700..701)).is_empty(), "once");
    assert_eq!(huge.lost(pages(0..3000)), [PageNo(1124)]);
    assert_eq!(huge.kept(), 0);
    huge.lost(pages(0..0));
}

#[test]
fn a_huge_page_found_anew_begins_with_nothing() {
    let mut huge = two_of_four(50.0);
    huge.can_merge(PageNo(700));
    huge.found(pages(612..1124));
    assert_eq!(huge.kept(), 0);
    assert!(huge.keeps(PageNo(700)));
}

#[test]
fn with_a_share_of_everything_none_is_given_up() {
    let mut huge = two_of_four(100.0);
    assert!((612..1636).all(|page| huge.can_merge(PageNo(page)).is_none()));
}
