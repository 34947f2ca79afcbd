//! `scrape`: what it costs to be seen. A daemon with many clients is scraped by `pageone metrics`,
//! as Prometheus does, and asked for its status, as `pageone top` does each second.
//!
//! 1. Clients fill and mark memory; all of it is merged.
//! 2. The CPU time of the daemon at rest is taken over whole merge periods.
//! 3. Many scrapes follow each other. What the daemon and the exporter use for them, less what the
//!    daemon uses at rest, is divided by their number.
//!
//! One request runs on a thread that ends with it, so CPU times are those of the whole processes.
//! Those come in steps of 10 ms: the number of requests makes that small.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bench_common::interrupt::Interrupt;
use bench_common::report::{Row, Sheet};
use kmem::PAGE_SIZE;
use kmem::procfs;

use crate::harness::content::Case;
use crate::harness::hold::{order_all, start_all};
use crate::subjects::pageone::{PageOne, Sums};

/// How long merging may take.
const MERGE_LIMIT: Duration = Duration::from_secs(600);
/// Merge period, in seconds.
const PERIOD: f64 = 20.0;
/// Until everything is merged.
const FAST_PERIOD: f64 = 1.0;
/// How often Prometheus scrapes, and `top` asks, in seconds.
const SCRAPE_EVERY: f64 = 15.0;
const TOP_EVERY: f64 = 1.0;
/// For how long an answer serves all scrapers, and a little more.
const ANSWER_LASTS: Duration = Duration::from_millis(1050);

/// What is done.
struct Plan {
    clients: usize,
    /// Of each client.
    pages: usize,
    /// Requests of each kind.
    requests: u32,
    /// Merge periods at rest.
    periods: u32,
}

impl Plan {
    fn new(quick: bool) -> Self {
        match quick {
            false => Self { clients: 64, pages: 64 << 20 >> 12, requests: 500, periods: 3 },
            true => Self { clients: 16, pages: 4 << 20 >> 12, requests: 100, periods: 1 },
        }
    }
}

/// `pageone metrics` that answers; it is killed with this value.
struct Exporter {
    child: Child,
    address: String,
}

impl Exporter {
    fn start(pageone: &PageOne) -> Result<Self> {
        let mut command = pageone.pageone(&["metrics", "--listen", "127.0.0.1:0", "--names"]);
        let mut child = command.stderr(Stdio::piped()).spawn().context("cannot start the exporter")?;
        let mut line = String::new();
        BufReader::new(child.stderr.take().context("no pipe")?).read_line(&mut line)?;
        let place = line.trim().rsplit("http://").next().unwrap_or_default();
        Ok(Self { address: place.trim_end_matches("/metrics").to_owned(), child })
    }

    /// Scrapes once; gives the length of the answer.
    fn scrape(&self) -> Result<usize> {
        std::thread::sleep(ANSWER_LASTS);
        let mut stream = TcpStream::connect(&self.address)?;
        let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n";
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.ends_with("# EOF\n"), "the answer is cut off: {answer}");
        Ok(answer.len())
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the bench.
pub(crate) fn run(quick: bool) -> Result<Vec<Row>> {
    let plan = Plan::new(quick);
    let interrupt = Interrupt::watch()?;
    let pageone = PageOne::find()?;
    let case = format!("{} clients of {} MiB", plan.clients, (plan.pages * PAGE_SIZE) >> 20);
    let mut sheet = Sheet { bench: "scrape", case, subject: "pageone", threads: 1, rows: Vec::new() };
    eprintln!("scrape: {} clients fill their memory", plan.clients);
    let mut clients = start_all(plan.clients, plan.pages, Case::Idle, |program| pageone.launch(program))?;
    let daemon = pageone.daemon(FAST_PERIOD, &interrupt)?;
    order_all(&mut clients, "mark")?;
    let goal = (plan.clients * plan.pages) as u64 * 99 / 100;
    interrupt.until("PageONE has merged the clients' memory", MERGE_LIMIT, || {
        let status = pageone.status()?;
        Ok((status.merged() + status.zero() >= goal).then_some(()))
    })?;
    daemon.stop()?;
    let daemon = pageone.daemon(PERIOD, &interrupt)?;
    interrupt.until("the second daemon has taken over", MERGE_LIMIT, || {
        let status = pageone.status()?;
        Ok(status.clients().all(|client| client.metrics.full_scans >= 3).then_some(()))
    })?;
    interrupt.sleep(Duration::from_secs_f64(PERIOD / 2.0))?;

    eprintln!("scrape: at rest");
    let cpu = |pid| procfs::cpu_time(pid).context("cannot read a CPU time");
    let (before, began) = (cpu(daemon.pid())?, Instant::now());
    interrupt.sleep(Duration::from_secs_f64(PERIOD) * plan.periods)?;
    let rest = (cpu(daemon.pid())? - before).as_secs_f64() / began.elapsed().as_secs_f64();
    sheet.add("cpu_percent_of_one_at_rest", rest * 100.0, "%");

    let exporter = Exporter::start(&pageone)?;
    let mut length = 0;
    let mut measure = |what: &str, every: f64, names: [&'static str; 2], request: &mut dyn FnMut() -> Result<()>| {
        eprintln!("scrape: {what}");
        let (before, theirs, began) = (cpu(daemon.pid())?, cpu(exporter.child.id() as i32)?, Instant::now());
        (0..plan.requests).try_for_each(|_| request())?;
        let used = (cpu(daemon.pid())? - before).as_secs_f64() - rest * began.elapsed().as_secs_f64();
        let each = used / f64::from(plan.requests);
        sheet.add(names[0], each * 1e3, "ms");
        sheet.add(names[1], each / every * 100.0, "%");
        Ok::<_, anyhow::Error>((cpu(exporter.child.id() as i32)? - theirs).as_secs_f64() / f64::from(plan.requests))
    };
    let names = ["daemon_ms_per_scrape", "cpu_percent_of_one_daemon_scraped_each_15_s"];
    let exporters = measure("scrapes", SCRAPE_EVERY, names, &mut || {
        length = exporter.scrape()?;
        Ok(())
    })?;
    let names = ["daemon_ms_per_status", "cpu_percent_of_one_daemon_asked_each_second"];
    measure("status, as top asks", TOP_EVERY, names, &mut || pageone.status().map(drop))?;
    sheet.add("exporter_ms_per_scrape", exporters * 1e3, "ms");
    sheet.add("scrape_length", length as f64 / 1024.0, "KiB");
    Ok(sheet.rows)
}
