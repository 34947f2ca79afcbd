//! A request, and its answer.
//!
//! | request | answer |
//! |---|---|
//! | without a password where one is asked for | 401 |
//! | `GET /metrics` | the metrics, in the format that `Accept` prefers; 503 without a daemon |
//! | `GET /` | a page for people |
//! | another path, another method | 404, 405 |
//!
//! `HEAD` is `GET` without the body (RFC 9110).

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use control::{Format, Rows};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ACCEPT, ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::{Method, Request, Response, StatusCode};

use crate::figures::Figures;
use crate::users::{Checks, Verdict};
use crate::web::Web;

/// Who sees names of clients and domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Whoever connects.
    ForAll,
    /// Who gives a password, or a certificate that was checked.
    ForKnown,
}

/// What all connections have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) figures: Figures,
    pub(crate) checks: Checks,
    pub(crate) names: Names,
}

/// Who asks.
#[derive(Debug)]
pub(crate) struct Caller {
    /// TLS and users as they were when it connected.
    pub(crate) web: Option<Arc<Web>>,
    /// Set when it has asked.
    pub(crate) has_asked: Arc<AtomicBool>,
    /// Whether it has a certificate that was checked.
    pub(crate) has_certificate: bool,
}

type Answer = Response<Full<Bytes>>;

pub(crate) async fn answer(
    request: Request<Incoming>,
    caller: Arc<Caller>,
    shared: Arc<Shared>,
) -> Result<Answer, Infallible> {
    caller.has_asked.store(true, Ordering::Relaxed);
    let users = caller.web.as_ref().map(|web| &web.users).filter(|users| !users.hashes.is_empty());
    let verdict = match users {
        Some(users) => Some(shared.checks.verdict(users, request.headers().get(AUTHORIZATION)).await),
        None => None,
    };
    let rows = match (verdict, shared.names) {
        (Some(Verdict::Right), _) | (_, Names::ForAll) => Rows::All,
        (_, Names::ForKnown) if caller.has_certificate => Rows::All,
        _ => Rows::Host,
    };
    let mut answer = match verdict {
        Some(Verdict::Wrong) => with(
            text(StatusCode::UNAUTHORIZED, "Give a user and a password."),
            WWW_AUTHENTICATE,
            "Basic realm=\"PageONE\"",
        ),
        Some(Verdict::Busy) => {
            with(text(StatusCode::TOO_MANY_REQUESTS, "Others give passwords; come again."), RETRY_AFTER, "1")
        }
        Some(Verdict::Right) | None => match *request.method() {
            Method::GET | Method::HEAD => page(request.uri().path(), request.headers(), rows, &shared.figures).await,
            _ => with(text(StatusCode::METHOD_NOT_ALLOWED, "Ask for GET /metrics."), ALLOW, "GET, HEAD"),
        },
    };
    if let Some(web) = &caller.web {
        answer.headers_mut().extend(web.headers.clone());
    }
    Ok(answer)
}

async fn page(path: &str, fields: &HeaderMap, rows: Rows, figures: &Figures) -> Answer {
    match path {
        "/metrics" => {
            let accept: Vec<_> = fields.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
            let format = preferred(&accept.join(","));
            match figures.text(rows, format).await {
                Ok(body) => with(Response::new(body.into()), CONTENT_TYPE, format.content_type()),
                Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, &error),
            }
        }
        "/" => {
            let page = include_str!("page.html").replace("VERSION", figures.version);
            with(Response::new(Bytes::from(page).into()), CONTENT_TYPE, "text/html; charset=utf-8")
        }
        _ => text(StatusCode::NOT_FOUND, "Ask for GET /metrics."),
    }
}

fn text(status: StatusCode, line: &str) -> Answer {
    let mut answer = Response::new(Bytes::from(format!("{line}\n")).into());
    *answer.status_mut() = status;
    with(answer, CONTENT_TYPE, "text/plain; charset=utf-8")
}

fn with(mut answer: Answer, field: HeaderName, value: &'static str) -> Answer {
    answer.headers_mut().insert(field, HeaderValue::from_static(value));
    answer
}

/// The format that a field `Accept` weighs most; OpenMetrics if both weigh the same and it is
/// named (RFC 9110, section 12.5.1).
fn preferred(accept: &str) -> Format {
    let weight = |of: &str| {
        let ranges = accept.split(',').map(|range| range.split(';').map(str::trim));
        let weights = ranges.filter_map(|mut range| {
            let is_it = range.next()?.eq_ignore_ascii_case(of);
            let q = range.find_map(|parameter| parameter.strip_prefix("q=")).map_or(Ok(1.0), str::parse::<f32>);
            is_it.then_some(q.unwrap_or(0.0))
        });
        weights.fold(0.0, f32::max)
    };
    let open = weight("application/openmetrics-text");
    if open > 0.0 && open >= weight("text/plain") { Format::OpenMetrics } else { Format::Prometheus }
}

#[cfg(test)]
mod tests;
