//! The daemon is asked by one at a time.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

#[test]
fn of_many_who_scrape_at_once_one_asks_the_daemon_and_all_get_the_answer() {
    let (asked, inside) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (counted, within) = (asked.clone(), inside.clone());
    let ask = move || {
        assert_eq!(within.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
        counted.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        within.fetch_sub(1, Ordering::SeqCst);
        Err("no daemon".into())
    };
    let figures = Arc::new(Figures::new("1", Arc::new(ask)));
    let begin = Instant::now();
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        // One that goes away: its thread goes on, and nobody asks beside it.
        drop(tokio::spawn({
            let figures = figures.clone();
            async move { figures.text(Rows::All, Format::Prometheus).await }
        }));
        let many = (0..100).map(|_| {
            let figures = figures.clone();
            tokio::spawn(async move { figures.text(Rows::Host, Format::OpenMetrics).await })
        });
        for one in many.collect::<Vec<_>>() {
            assert_eq!(one.await.unwrap().unwrap_err(), "no daemon");
        }
    });
    let most = begin.elapsed().as_secs() + 1;
    assert!(u64::from(asked.load(Ordering::SeqCst)) <= most, "once for each second at most");
}

#[test]
fn each_gets_its_own_rows_and_format() {
    let figures = Figures::new("1.2.3", Arc::new(|| Ok(Status::default())));
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        for format in [Format::OpenMetrics, Format::Prometheus] {
            let text = figures.text(Rows::Host, format).await.unwrap();
            assert_eq!(text, control::exposition(&Status::default(), "1.2.3", Rows::Host, format));
        }
    });
}
