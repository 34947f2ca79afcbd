use super::*;

fn stamps(pages: &[u16], now: u16) -> Stamps {
    let mut stamps = Stamps::new(pages.len() as u32, now).unwrap();
    for (page, &stamp) in pages.iter().enumerate().filter(|&(_, &stamp)| stamp != 0) {
        stamps.now = stamp;
        stamps.record(PageNo(page as u32));
    }
    Stamps { now, found: 0, ..stamps }
}

#[test]
fn what_nobody_touches_costs_8_bytes_for_2_mib() {
    let mut stamps = Stamps::new(1 << 28, 7).unwrap();
    assert_eq!(stamps.bytes(), 8 << 19, "of 1 TiB");
    [0, 1, 1 << 27, (1 << 28) - 1, 1 << 28].into_iter().for_each(|page| stamps.record(PageNo(page)));
    assert_eq!((stamps.bytes(), stamps.found), ((8 << 19) + 3 * 1024, 4));
    let mut histogram = [0; 601];
    stamps.ages(&mut histogram);
    assert_eq!((histogram[0], histogram[600]), (4, (1 << 28) - 4));
}

#[test]
fn pages_are_counted_by_the_age_of_their_stamp() {
    let mut histogram = [0; 601];
    stamps(&[0, 700, 699, 690, 100, 1], 700).ages(&mut histogram);
    assert_eq!((histogram[0], histogram[1], histogram[10], histogram[600]), (1, 1, 1, 3));
}

#[test]
fn heat_is_counted_by_parts() {
    let mut pages = vec![0; 1300];
    pages[511] = 100;
    pages[512] = 95;
    pages[513] = 2;
    pages[1299] = 100;
    assert_eq!(stamps(&pages, 100).heat(90), (512, vec![1, 1, 1]));
    let (part, parts) = stamps(&vec![7; 512 * 1024 + 1], 7).heat(90);
    assert_eq!((part, parts.len(), parts[0], parts[512]), (1024, 513, 1024, 1));
}

#[test]
fn a_page_is_recorded_once_a_scan() {
    let mut one = stamps(&[0; 4], 5);
    [3, 3, 9].into_iter().for_each(|page| one.record(PageNo(page)));
    let mut histogram = [0; 601];
    one.ages(&mut histogram);
    assert_eq!((histogram[0], histogram[600], one.found), (1, 3, 2));
}
