use super::*;

/// What is predicted behind pages from 10 on that have these handles.
fn next(handles: &[u32]) -> Vec<(u32, u32)> {
    let mut prediction = Prediction::default();
    (10..).zip(handles).for_each(|(page, &handle)| prediction.add(PageNo(page), Some(handle)));
    let mut next = Vec::new();
    prediction.each(PageNo(10 + handles.len() as u32), |page, handle| {
        next.push((page.0, handle));
        next.len() < 3
    });
    next
}

#[test]
fn a_sequence_is_predicted_once_it_is_proven_and_ends_where_a_page_differs() {
    assert_eq!(next(&[5, 6, 7, 8, 9, 10, 11]), [], "seven are too few");
    assert_eq!(next(&[5, 6, 7, 8, 9, 10, 11, 12]), [(18, 13), (19, 14), (20, 15)]);
    assert_eq!(next(&[5; 8]), [(18, 5), (19, 5), (20, 5)], "one content");
    assert_eq!(next(&[5, 6, 7, 7, 8, 9, 10, 11]), [], "the step changed");
    let mut prediction = Prediction::default();
    (0..8).for_each(|page| prediction.add(PageNo(page), Some(page)));
    assert_eq!((prediction.reach(PageNo(8)), prediction.reach(PageNo(9))), (64, 0));
    (0..9).for_each(|_| prediction.goes_on());
    assert_eq!(prediction.reach(PageNo(8)), 512);
    prediction.add(PageNo(8), None);
    assert_eq!(prediction.reach(PageNo(9)), 0);
}
