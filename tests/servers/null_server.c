/* An S3 server that does as little as possible: the ceiling to measure S3 clients against, on one machine.

   cc -O2 -pthread -o null_server null_server.c -ldl
   ./null_server [--port N] [--drop] [--arena-mib N] [--cert PEM]       prints "PORT" when it is ready; loopback only

   Objects live in one memory file; a body is received straight into it and sent from it by sendfile. With --drop the
   bodies of PUTs are thrown away (only their length is kept) and reads get the same fixed pseudo-random bytes: no page
   faults, so what is measured is the client. --cert FILE (key and certificate, PEM) serves TLS, through libssl.so.3
   loaded at run time. The process ends when its standard input does.

   Spoken: GET (Range, If-Match), HEAD, PUT (If-None-Match: *, copy source, x-amz-meta-*), DELETE, multipart uploads,
   DeleteObjects, ListObjectsV2, HEAD and PUT of a bucket; path style. No authentication, no checksums, no aws-chunked
   bodies: it is for speed, and for faults, never for correctness of signatures.

   GET /_stats answers {"requests": .., "get": .., ...}. POST /_set?latency_ms=20&mb_per_s=200&slowdown_percent=90&hang=1
   changes at run time: a delay before each answer; a bandwidth that all connections share; the share of requests that get
   503 SlowDown (evenly spread by a counter); no answer at all. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_MAX (64 << 10)
#define SINK (256 << 10)
#define SLICE (64 << 10)
#define TABLE (1 << 16)
#define FIXED (64L << 20) /* bytes that --drop serves; longer objects repeat them */

typedef struct Object {
  struct Object *next;
  char *key, *meta;
  long offset, length;
  char etag[35];
  int references;
} Object;
typedef struct Extent { struct Extent *next; long offset, length; } Extent;
typedef struct Part { struct Part *next; int number; long offset, length; } Part;
typedef struct Upload { struct Upload *next; long id; char *key, *meta; Part *parts; } Upload;
typedef struct Connection { int fd; void *tls; char *head; size_t have; char *sink; } Connection;

static Object *table[TABLE];
static Extent *free_list;
static Upload *uploads;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, link_lock = PTHREAD_MUTEX_INITIALIZER;
static int arena_fd, drop;
static char *arena;
static long arena_size = 1L << 30, arena_used, serial;
static volatile double latency_ms, mb_per_s;
static volatile int slowdown_percent, hang;
static double link_free; /* when the shared link has sent what was promised, CLOCK_MONOTONIC seconds */
static long n_requests, n_get, n_put, n_head, n_delete, n_post, n_slow, n_connections, b_in, b_out;

/* TLS, by hand: the headers need not be installed. */
static void *tls_context;
static void *(*ssl_new)(void *);
static int (*ssl_set_fd)(void *, int), (*ssl_accept)(void *), (*ssl_read)(void *, void *, int),
    (*ssl_write)(void *, const void *, int);
static void (*ssl_free)(void *);

static int start_tls(const char *pem) {
  void *lib = dlopen("libssl.so.3", RTLD_NOW | RTLD_GLOBAL);
  if (!lib) { fprintf(stderr, "%s\n", dlerror()); return -1; }
  void *(*method)(void) = dlsym(lib, "TLS_server_method"), *(*context)(void *) = dlsym(lib, "SSL_CTX_new");
  int (*chain)(void *, const char *) = dlsym(lib, "SSL_CTX_use_certificate_chain_file");
  int (*key)(void *, const char *, int) = dlsym(lib, "SSL_CTX_use_PrivateKey_file");
  ssl_new = dlsym(lib, "SSL_new"), ssl_set_fd = dlsym(lib, "SSL_set_fd"), ssl_accept = dlsym(lib, "SSL_accept");
  ssl_read = dlsym(lib, "SSL_read"), ssl_write = dlsym(lib, "SSL_write"), ssl_free = dlsym(lib, "SSL_free");
  if (!method || !context || !chain || !key || !ssl_new || !ssl_set_fd || !ssl_accept || !ssl_read || !ssl_write || !ssl_free)
    return -1;
  tls_context = context(method());
  if (!tls_context || chain(tls_context, pem) != 1 || key(tls_context, pem, 1) != 1) {
    fprintf(stderr, "the certificate %s cannot be used\n", pem);
    return -1;
  }
  return 0;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static void wait_until(double when) {
  struct timespec t = {(time_t)when, (long)((when - (time_t)when) * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL)) {}
}
static void pay(long nbytes) { /* wait until the shared link has carried so many bytes */
  if (!(mb_per_s > 0)) return;
  pthread_mutex_lock(&link_lock);
  double start = now(), end = (link_free > start ? link_free : start) + nbytes / (mb_per_s * 1e6);
  link_free = end;
  pthread_mutex_unlock(&link_lock);
  wait_until(end);
}

static ssize_t receive(Connection *c, void *to, size_t room) {
  if (c->tls) return ssl_read(c->tls, to, room > (1 << 30) ? 1 << 30 : (int)room);
  return recv(c->fd, to, room, 0);
}
static int transmit(Connection *c, const char *from, size_t n, int more) {
  while (n) {
    ssize_t k = c->tls ? ssl_write(c->tls, from, n > (1 << 30) ? 1 << 30 : (int)n)
                       : send(c->fd, from, n, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (k <= 0) return -1;
    from += k, n -= k;
  }
  return 0;
}
static int transmit_object(Connection *c, long offset, long n) {
  __atomic_fetch_add(&b_out, n, __ATOMIC_RELAXED);
  while (n > 0) {
    long piece = n, at = offset;
    if (drop) {
      at = offset % FIXED;
      if (piece > FIXED - at) piece = FIXED - at;
    }
    if (mb_per_s > 0 && piece > SLICE) piece = SLICE;
    pay(mb_per_s > 0 ? piece : 0);
    if (c->tls) {
      if (transmit(c, arena + at, piece, 0)) return -1;
    } else {
      off_t from = at;
      long left = piece;
      while (left > 0) {
        ssize_t k = sendfile(c->fd, arena_fd, &from, left);
        if (k <= 0) return -1;
        left -= k;
      }
    }
    offset += piece, n -= piece;
  }
  return 0;
}

static long allocate(long length) { /* lock held; -1 when the arena is full */
  long need = (length + 4095) & ~4095L;
  for (Extent **at = &free_list; *at; at = &(*at)->next)
    if ((*at)->length >= need) {
      Extent *found = *at;
      long offset = found->offset;
      found->offset += need, found->length -= need;
      if (!found->length) { *at = found->next; free(found); }
      return offset;
    }
  if (arena_used + need > arena_size) return -1;
  arena_used += need;
  return arena_used - need;
}
static void give_back(long offset, long length) { /* lock held */
  if (drop || !length) return;
  Extent *e = malloc(sizeof *e);
  *e = (Extent){free_list, offset, (length + 4095) & ~4095L};
  free_list = e;
}
static unsigned hash(const char *key) {
  unsigned h = 2166136261u;
  for (; *key; key++) h = (h ^ (unsigned char)*key) * 16777619u;
  return h & (TABLE - 1);
}
static Object *find(const char *key) { /* lock held */
  Object *o = table[hash(key)];
  while (o && strcmp(o->key, key)) o = o->next;
  return o;
}
static void release(Object *o) { /* lock held */
  if (--o->references) return;
  give_back(o->offset, o->length);
  free(o->key), free(o->meta), free(o);
}
static int forget(const char *key) { /* lock held */
  for (Object **at = &table[hash(key)]; *at; at = &(*at)->next)
    if (!strcmp((*at)->key, key)) {
      Object *o = *at;
      *at = o->next;
      release(o);
      return 1;
    }
  return 0;
}
static Object *store(const char *key, long offset, long length, const char *meta) { /* lock held */
  forget(key);
  Object *o = calloc(1, sizeof *o);
  o->key = strdup(key), o->meta = strdup(meta), o->offset = offset, o->length = length, o->references = 1;
  snprintf(o->etag, sizeof o->etag, "\"%032lx\"", ++serial * 2654435761L);
  o->next = table[hash(key)], table[hash(key)] = o;
  return o;
}

static const char *header(const char *head, const char *name) { /* the value; head is NUL-terminated */
  size_t n = strlen(name);
  for (const char *line = strstr(head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
    if (!strncasecmp(line + 2, name, n) && line[2 + n] == ':') {
      line += 3 + n;
      while (*line == ' ') line++;
      return line;
    }
  return NULL;
}
static int header_is(const char *value, const char *text) { return value && !strncmp(value, text, strlen(text)); }
static void decode(char *to, const char *from, const char *end) {
  for (; from < end; from++) {
    unsigned v;
    if (*from == '%' && end - from > 2 && sscanf(from + 1, "%2x", &v) == 1) *to++ = (char)v, from += 2;
    else *to++ = *from;
  }
  *to = 0;
}
static char *query(const char *q, const char *name, char *to, size_t room) { /* decoded value, or NULL */
  size_t n = strlen(name);
  while (q && *q) {
    const char *end = strchrnul(q, '&');
    if (!strncmp(q, name, n) && (q[n] == '=' || q + n == end)) {
      const char *value = q[n] == '=' ? q + n + 1 : end;
      if ((size_t)(end - value) >= room) return NULL;
      decode(to, value, end);
      return to;
    }
    q = *end ? end + 1 : end;
  }
  return NULL;
}
static void metadata(const char *head, char *to, size_t room) { /* the x-amz-meta- lines */
  *to = 0;
  for (const char *line = strstr(head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
    if (!strncasecmp(line + 2, "x-amz-meta-", 11)) {
      const char *end = strstr(line + 2, "\r\n");
      size_t n = (end ? (size_t)(end - line) : strlen(line)) - 2, have = strlen(to);
      if (have + n + 3 < room) memcpy(to + have, line + 2, n), strcpy(to + have + n, "\r\n");
    }
}

static int answer(Connection *c, int head_only, const char *status, const char *extra, const char *body) {
  char out[HEAD_MAX];
  size_t n = strlen(body);
  int k = snprintf(out, sizeof out, "HTTP/1.1 %s\r\nx-amz-request-id: null\r\n%s%sContent-Length: %zu\r\n\r\n", status, extra,
                   n ? "Content-Type: application/xml\r\n" : "", n);
  if (transmit(c, out, k, !head_only && n)) return -1;
  return head_only ? 0 : transmit(c, body, n, 0);
}
static int fail(Connection *c, int head_only, const char *status, const char *code) {
  char body[256];
  snprintf(body, sizeof body, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
  return answer(c, head_only, status, "", head_only ? "" : body);
}

static int get(Connection *c, const char *head, const char *key, int head_only) {
  pthread_mutex_lock(&lock);
  Object *o = find(key);
  if (o) o->references++;
  pthread_mutex_unlock(&lock);
  if (!o) return fail(c, head_only, "404 Not Found", "NoSuchKey");
  int result;
  const char *match = header(head, "If-Match"), *range = header(head, "Range");
  long low = 0, high = o->length - 1;
  if (match && !header_is(match, o->etag) && *match != '*') {
    result = fail(c, head_only, "412 Precondition Failed", "PreconditionFailed");
  } else {
    int part = 0;
    if (header_is(range, "bytes=")) {
      part = 1, range += 6;
      if (*range == '-') low = o->length - atol(range + 1) < 0 ? 0 : o->length - atol(range + 1);
      else {
        char *dash;
        low = strtol(range, &dash, 10);
        if (*dash == '-' && dash[1] >= '0' && dash[1] <= '9') high = atol(dash + 1);
      }
      if (high >= o->length) high = o->length - 1;
    }
    if (part && low > high) result = fail(c, head_only, "416 Range Not Satisfiable", "InvalidRange");
    else {
      char out[HEAD_MAX], where[80] = "";
      if (part) snprintf(where, sizeof where, "Content-Range: bytes %ld-%ld/%ld\r\n", low, high, o->length);
      int k = snprintf(out, sizeof out,
                       "HTTP/1.1 %s\r\nETag: %s\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\nx-amz-request-id: null\r\n%s%s"
                       "Accept-Ranges: bytes\r\nContent-Type: binary/octet-stream\r\nContent-Length: %ld\r\n\r\n",
                       part ? "206 Partial Content" : "200 OK", o->etag, where, o->meta, high - low + 1);
      result = transmit(c, out, k, !head_only && high >= low);
      if (!result && !head_only) result = transmit_object(c, o->offset + low, high - low + 1);
    }
  }
  pthread_mutex_lock(&lock);
  release(o);
  pthread_mutex_unlock(&lock);
  return result;
}

/* The body of the request: `early` bytes of it came with the head. Returns 0, or -1 when the connection broke. */
static int receive_body(Connection *c, size_t head_length, long length, char *to) {
  long early = c->have - head_length;
  if (early > length) early = length;
  if (to) memcpy(to, c->head + head_length, early);
  memmove(c->head, c->head + head_length + early, c->have - head_length - early);
  c->have -= head_length + early;
  long done = early;
  while (done < length) {
    long want = length - done;
    if (!to && want > SINK) want = SINK;
    if (mb_per_s > 0 && want > SLICE) want = SLICE;
    ssize_t k = receive(c, to ? to + done : c->sink, want);
    if (k <= 0) return -1;
    done += k;
    pay(mb_per_s > 0 ? k : 0);
  }
  __atomic_fetch_add(&b_in, length, __ATOMIC_RELAXED);
  return 0;
}

static int put(Connection *c, const char *head, size_t head_length, long length, const char *key, const char *q) {
  char text[4096], meta[8192];
  const char *source = header(head, "x-amz-copy-source"), *none = header(head, "If-None-Match");
  char *upload = query(q, "uploadId", text, sizeof text);
  long id = upload ? strtol(upload, NULL, 16) : 0;
  int refused = 0;
  metadata(head, meta, sizeof meta);
  if (header(head, "Transfer-Encoding") || header(head, "Content-Encoding")) {
    fail(c, 0, "501 Not Implemented", "NotImplemented");
    return -1;
  }
  pthread_mutex_lock(&lock);
  if (none && *none == '*' && !upload && find(key)) refused = 1;
  long offset = refused || drop ? 0 : allocate(length);
  pthread_mutex_unlock(&lock);
  if (offset < 0) refused = 3;
  if (receive_body(c, head_length, length, refused || drop ? NULL : arena + offset)) {
    if (!refused) { pthread_mutex_lock(&lock); give_back(offset, length); pthread_mutex_unlock(&lock); }
    return -1;
  }
  if (refused == 1) return fail(c, 0, "412 Precondition Failed", "PreconditionFailed");
  if (refused) return fail(c, 0, "507 Insufficient Storage", "InsufficientStorage");
  char extra[128] = "", body[256] = "";
  pthread_mutex_lock(&lock);
  if (source) {
    char from[4096];
    const char *end = strstr(source, "\r\n");
    if (*source == '/') source++;
    size_t n = end - source < (long)sizeof from - 2 ? end - source : (long)sizeof from - 2;
    from[0] = '/';
    decode(from + 1, source, source + n);
    Object *o = find(from);
    long copy = o ? (drop ? 0 : allocate(o->length)) : -2;
    if (copy >= 0) {
      if (!drop) memcpy(arena + copy, arena + o->offset, o->length);
      const char *directive = header(head, "x-amz-metadata-directive");
      char *keep = strdup(header_is(directive, "REPLACE") ? meta : o->meta);
      o = store(key, copy, o->length, keep);
      free(keep);
      snprintf(body, sizeof body, "<CopyObjectResult><ETag>%s</ETag><LastModified>2025-01-01T00:00:00.000Z</LastModified></CopyObjectResult>", o->etag);
    } else refused = copy == -2 ? 2 : 3;
  } else if (upload) {
    Upload *u = uploads;
    while (u && u->id != id) u = u->next;
    char number[32];
    if (u && query(q, "partNumber", number, sizeof number)) {
      Part *p = malloc(sizeof *p);
      *p = (Part){u->parts, atoi(number), offset, length};
      u->parts = p;
      snprintf(extra, sizeof extra, "ETag: \"%032lx\"\r\n", ++serial);
    } else { give_back(offset, length); refused = 2; }
  } else if (none && *none == '*' && find(key)) {
    give_back(offset, length);
    refused = 1;
  } else {
    snprintf(extra, sizeof extra, "ETag: %s\r\n", store(key, offset, length, meta)->etag);
  }
  pthread_mutex_unlock(&lock);
  if (refused == 1) return fail(c, 0, "412 Precondition Failed", "PreconditionFailed");
  if (refused == 2) return fail(c, 0, "404 Not Found", upload ? "NoSuchUpload" : "NoSuchKey");
  if (refused == 3) return fail(c, 0, "507 Insufficient Storage", "InsufficientStorage");
  return answer(c, 0, "200 OK", extra, body);
}

static int complete(Connection *c, long id, const char *key, int exclusive) {
  char body[256] = "";
  int refused = 2;
  pthread_mutex_lock(&lock);
  for (Upload **at = &uploads; *at; at = &(*at)->next)
    if ((*at)->id == id) {
      Upload *u = *at;
      if (exclusive && find(key)) { refused = 1; break; }
      long total = 0, done = 0;
      for (Part *p = u->parts; p; p = p->next) total += p->length;
      long offset = drop ? 0 : allocate(total);
      if (offset < 0) { refused = 3; break; }
      for (int number = 1; number <= 10000 && done < total; number++)
        for (Part *p = u->parts; p; p = p->next)
          if (p->number == number) {
            if (!drop) memcpy(arena + offset + done, arena + p->offset, p->length);
            done += p->length;
          }
      while (u->parts) { Part *p = u->parts; u->parts = p->next; give_back(p->offset, p->length); free(p); }
      *at = u->next;
      snprintf(body, sizeof body, "<CompleteMultipartUploadResult><ETag>%s</ETag></CompleteMultipartUploadResult>",
               store(key, offset, total, u->meta)->etag);
      free(u->key), free(u->meta), free(u);
      refused = 0;
      break;
    }
  pthread_mutex_unlock(&lock);
  if (refused == 1) return fail(c, 0, "412 Precondition Failed", "PreconditionFailed");
  if (refused) return fail(c, 0, refused == 2 ? "404 Not Found" : "507 Insufficient Storage", refused == 2 ? "NoSuchUpload" : "InsufficientStorage");
  return answer(c, 0, "200 OK", "", body);
}

static int by_key(const void *a, const void *b) { return strcmp((*(Object **)a)->key, (*(Object **)b)->key); }
static int list(Connection *c, const char *bucket, const char *q) {
  char prefix[4096] = "", after[4096] = "", most[32] = "1000", want[8192];
  query(q, "prefix", prefix, sizeof prefix);
  if (!query(q, "continuation-token", after, sizeof after)) query(q, "start-after", after, sizeof after);
  query(q, "max-keys", most, sizeof most);
  snprintf(want, sizeof want, "%s/%s", bucket, prefix);
  size_t n = strlen(want), skip = strlen(bucket) + 1, count = 0, room = 0;
  Object **found = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < TABLE; i++)
    for (Object *o = table[i]; o; o = o->next)
      if (!strncmp(o->key, want, n) && strcmp(o->key + skip, after) > 0) {
        if (count == room) found = realloc(found, (room = room ? 2 * room : 64) * sizeof *found);
        found[count++] = o;
      }
  if (count) qsort(found, count, sizeof *found, by_key);
  size_t limit = strtoul(most, NULL, 10), shown = count < limit ? count : limit, size = 0;
  char *body;
  FILE *out = open_memstream(&body, &size);
  fprintf(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
               "<Prefix>%s</Prefix><KeyCount>%zu</KeyCount><IsTruncated>%s</IsTruncated>", prefix, shown, count > shown ? "true" : "false");
  if (count > shown && shown) fprintf(out, "<NextContinuationToken>%s</NextContinuationToken>", found[shown - 1]->key + skip);
  for (size_t i = 0; i < shown; i++)
    fprintf(out, "<Contents><Key>%s</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><ETag>%s</ETag><Size>%ld</Size>"
                 "<StorageClass>STANDARD</StorageClass></Contents>", found[i]->key + skip, found[i]->etag, found[i]->length);
  fprintf(out, "</ListBucketResult>");
  fclose(out);
  pthread_mutex_unlock(&lock);
  int result = answer(c, 0, "200 OK", "", body);
  free(body), free(found);
  return result;
}

static int post(Connection *c, const char *head, size_t head_length, long length, const char *bucket, const char *key, const char *q) {
  char text[4096];
  char *body = calloc(1, length + 1);
  if (receive_body(c, head_length, length, body)) { free(body); return -1; }
  int result;
  if (query(q, "uploads", text, sizeof text)) {
    char meta[8192], out[512];
    metadata(head, meta, sizeof meta);
    Upload *u = calloc(1, sizeof *u);
    pthread_mutex_lock(&lock);
    *u = (Upload){uploads, ++serial, strdup(key), strdup(meta), NULL};
    uploads = u;
    pthread_mutex_unlock(&lock);
    snprintf(out, sizeof out, "<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><UploadId>%lx</UploadId>"
                              "</InitiateMultipartUploadResult>", u->id);
    result = answer(c, 0, "200 OK", "", out);
  } else if (query(q, "uploadId", text, sizeof text)) {
    const char *none = header(head, "If-None-Match");
    result = complete(c, strtol(text, NULL, 16), key, none && *none == '*');
  } else if (query(q, "delete", text, sizeof text)) {
    for (char *at = strstr(body, "<Key>"); at; at = strstr(at, "<Key>")) {
      char name[8192];
      char *end = strstr(at += 5, "</Key>");
      if (!end) break;
      snprintf(name, sizeof name, "%s/%.*s", bucket, (int)(end - at), at);
      pthread_mutex_lock(&lock);
      forget(name);
      pthread_mutex_unlock(&lock);
    }
    result = answer(c, 0, "200 OK", "", "<DeleteResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"></DeleteResult>");
  } else result = fail(c, 0, "501 Not Implemented", "NotImplemented");
  free(body);
  return result;
}

static int control(Connection *c, const char *path, const char *q) {
  char text[64], out[1024];
  if (!strcmp(path, "/_set")) {
    if (query(q, "latency_ms", text, sizeof text)) latency_ms = atof(text);
    if (query(q, "mb_per_s", text, sizeof text)) mb_per_s = atof(text);
    if (query(q, "slowdown_percent", text, sizeof text)) slowdown_percent = atoi(text);
    if (query(q, "hang", text, sizeof text)) hang = atoi(text);
  }
  snprintf(out, sizeof out,
           "{\"requests\": %ld, \"get\": %ld, \"put\": %ld, \"head\": %ld, \"delete\": %ld, \"post\": %ld, \"slowdown\": %ld, "
           "\"connections\": %ld, \"bytes_in\": %ld, \"bytes_out\": %ld}",
           n_requests, n_get, n_put, n_head, n_delete, n_post, n_slow, n_connections, b_in, b_out);
  return answer(c, 0, "200 OK", "", out);
}

/* One request whose head lies complete in c->head. Returns -1 when the connection must be closed. */
static int serve_one(Connection *c, size_t head_length) {
  char head[HEAD_MAX + 1], method[8], target[8192], path[8192], bucket[1024];
  memcpy(head, c->head, head_length);
  head[head_length] = 0;
  if (sscanf(head, "%7s %8191s", method, target) != 2) return -1;
  char *q = strchr(target, '?');
  decode(path, target, q ? q : target + strlen(target));
  if (q) *q++ = 0;
  const char *value = header(head, "Content-Length");
  long length = value ? atol(value) : 0;
  const char *slash = path[0] ? strchr(path + 1, '/') : NULL;
  int is_bucket = !slash || !slash[1], is_get = !strcmp(method, "GET"), is_head = !strcmp(method, "HEAD");
  snprintf(bucket, sizeof bucket, "%.*s", slash ? (int)(slash - path) : (int)strlen(path), path);
  if (!strncmp(path, "/_", 2)) {
    if (receive_body(c, head_length, length, NULL)) return -1;
    return control(c, path, q);
  }
  if (header(head, "Expect") && transmit(c, "HTTP/1.1 100 Continue\r\n\r\n", 25, 0)) return -1;
  long number = __atomic_add_fetch(&n_requests, 1, __ATOMIC_RELAXED);
  int is_put = !strcmp(method, "PUT"), is_post = !strcmp(method, "POST"), is_delete = !strcmp(method, "DELETE");
  __atomic_fetch_add(is_get ? &n_get : is_head ? &n_head : is_put ? &n_put : is_post ? &n_post : &n_delete, 1, __ATOMIC_RELAXED);
  while (hang) usleep(20000);
  if (number * 61 % 100 < slowdown_percent) { /* 61 and 100 have no common factor: exactly that share, well mixed */
    __atomic_fetch_add(&n_slow, 1, __ATOMIC_RELAXED);
    if (receive_body(c, head_length, length, NULL)) return -1;
    return fail(c, is_head, "503 Slow Down", "SlowDown");
  }
  if (latency_ms > 0 && !is_put) wait_until(now() + latency_ms / 1e3);
  if (is_post) return post(c, head, head_length, length, bucket, path, q);
  if (is_put && !is_bucket) {
    if (latency_ms > 0) wait_until(now() + latency_ms / 1e3);
    return put(c, head, head_length, length, path, q);
  }
  if (receive_body(c, head_length, length, NULL)) return -1;
  if (is_bucket && is_get) return list(c, bucket, q);
  if (is_bucket) return answer(c, is_head, "200 OK", "", "");
  if (is_get || is_head) return get(c, head, path, is_head);
  if (!is_delete) return fail(c, 0, "501 Not Implemented", "NotImplemented");
  char text[64];
  pthread_mutex_lock(&lock);
  if (!query(q, "uploadId", text, sizeof text)) forget(path);
  else
    for (Upload **at = &uploads; *at; at = &(*at)->next)
      if ((*at)->id == strtol(text, NULL, 16)) {
        Upload *u = *at;
        while (u->parts) { Part *p = u->parts; u->parts = p->next; give_back(p->offset, p->length); free(p); }
        *at = u->next;
        free(u->key), free(u->meta), free(u);
        break;
      }
  pthread_mutex_unlock(&lock);
  return answer(c, 0, "204 No Content", "", "");
}

static void *serve(void *argument) {
  Connection c = {.fd = (int)(long)argument, .head = malloc(HEAD_MAX + 1), .sink = malloc(SINK)};
  int one = 1;
  setsockopt(c.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  __atomic_fetch_add(&n_connections, 1, __ATOMIC_RELAXED);
  if (tls_context) {
    c.tls = ssl_new(tls_context);
    if (!ssl_set_fd(c.tls, c.fd) || ssl_accept(c.tls) != 1) goto out;
  }
  for (;;) {
    char *end;
    while (!(end = memmem(c.head, c.have, "\r\n\r\n", 4))) {
      if (c.have >= HEAD_MAX) goto out;
      ssize_t k = receive(&c, c.head + c.have, HEAD_MAX - c.have);
      if (k <= 0) goto out;
      c.have += k;
    }
    if (serve_one(&c, end + 4 - c.head)) break;
  }
out:
  if (c.tls) ssl_free(c.tls);
  close(c.fd);
  free(c.head), free(c.sink);
  return NULL;
}

static void *end_with_parent(void *unused) {
  char byte;
  while (read(0, &byte, 1) > 0) {}
  _exit(0);
  return unused;
}

int main(int count, char **words) {
  int port = 0;
  const char *certificate = NULL;
  for (int i = 1; i < count; i++) {
    if (!strcmp(words[i], "--drop")) drop = 1;
    else if (i + 1 < count && !strcmp(words[i], "--port")) port = atoi(words[++i]);
    else if (i + 1 < count && !strcmp(words[i], "--arena-mib")) arena_size = atol(words[++i]) << 20;
    else if (i + 1 < count && !strcmp(words[i], "--cert")) certificate = words[++i];
    else { fprintf(stderr, "unknown or incomplete option %s\n", words[i]); return 2; }
  }
  signal(SIGPIPE, SIG_IGN);
  if (certificate && start_tls(certificate)) return 3;
  if (drop) arena_size = FIXED;
  arena_fd = memfd_create("null_server", 0);
  if (arena_fd < 0 || ftruncate(arena_fd, arena_size)) { perror("memory file"); return 1; }
  arena = mmap(0, arena_size, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd, 0);
  if (arena == MAP_FAILED) { perror("mmap"); return 1; }
  if (drop)
    for (unsigned x = 12345, i = 0; i < FIXED / 4; i++) ((unsigned *)arena)[i] = x = x * 1664525u + 1013904223u;
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  socklen_t size = sizeof address;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1024) || getsockname(listener, (void *)&address, &size)) {
    perror("bind");
    return 1;
  }
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 1 << 20);
  pthread_t thread;
  pthread_create(&thread, &attributes, end_with_parent, NULL);
  for (;;) {
    int fd = accept(listener, 0, 0);
    if (fd < 0) continue;
    if (pthread_create(&thread, &attributes, serve, (void *)(long)fd)) close(fd);
  }
}
