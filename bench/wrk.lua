-- wrk script: chat turns of agent programs.
--
-- wrk ... URL -- REQUEST_FILE MODE PREFIX PROGRAMS THREADS
--
-- REQUEST_FILE holds the body; the mark in it stands for the program's id. MODE bound takes PROGRAMS programs in
-- turn (thread k of n has each n-th, so as many threads as connections gives each connection a program of its own);
-- MODE fresh gives each request an id that was never used. Ids have one width, so the request is cut at its marks
-- once and only joined again for each turn.

local MARK = "@program-id-here-@"

local threads_made = 0

function setup(thread)
  thread:set("thread_index", threads_made)
  threads_made = threads_made + 1
end

local function program_id(prefix, number)
  return string.format("%s-%09d", prefix, number)
end

local function cut(text)
  local pieces, from = {}, 1
  while true do
    local first, last = string.find(text, MARK, from, true)
    if not first then break end
    pieces[#pieces + 1] = string.sub(text, from, first - 1)
    from = last + 1
  end
  pieces[#pieces + 1] = string.sub(text, from)
  return pieces
end

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.body = file:read("*a")
  file:close()
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  wrk.headers["X-Session-ID"] = MARK

  local mode, prefix, programs, threads = args[2], args[3], tonumber(args[4]), tonumber(args[5])
  assert(#program_id(prefix, 0) == #MARK, "a program id must be as long as its mark")
  local pieces = cut(wrk.format())

  if mode == "bound" then
    local ready, at = {}, 0
    for number = thread_index, programs - 1, threads do
      ready[#ready + 1] = table.concat(pieces, program_id(prefix, number))
    end
    request = function()
      at = at % #ready + 1
      return ready[at]
    end
  else
    local number = thread_index - threads
    request = function()
      number = number + threads
      return table.concat(pieces, program_id(prefix, number))
    end
  end
end

function done(summary)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "duration_us": %d, "bytes": %d, "connect": %d, "read": %d, "write": %d, "status": %d, '
      .. '"timeout": %d}\n',
    summary.requests, summary.duration, summary.bytes, errors.connect, errors.read, errors.write, errors.status,
    errors.timeout))
end
